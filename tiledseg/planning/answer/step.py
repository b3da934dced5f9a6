"""The figures of a step that is planned, as a plan's first lines, a search and a job say them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiledseg.planning.answer.text import count_parts, duration, milliseconds, words
from tiledseg.planning.run.question import RunQuestion
from tiledseg.system.console import counted
from tiledseg.units import size

if TYPE_CHECKING:
    from tiledseg.planning.walk.choice import MemoryChoice

PROPOSED = " (as many as the GPUs take; --images-per-step sets it)"


def network_text(question: RunQuestion) -> str:
    """Return bands, classes, and lines of the network and its options, which may be the defaults of `train`."""
    network = question.network
    usual = question.keyed and type(network)().in_words.splitlines()[-1] == network.in_words.splitlines()[-1]
    counts = f"{network.bands} bands, {network.classes} classes"
    return f"{counts}\n{network.in_words}" + " (train's defaults)" * usual


def heading(question: RunQuestion) -> str:
    """Return the raster, and `network_text`."""
    return f"{words(question.shape)} px, {network_text(question)}"


def slow_precision(question: RunQuestion) -> str:
    """Return a warning where the machine has no faster rate for values of 16 bits, else nothing."""
    machine = question.figures
    slow = machine.known and question.value_bytes == 2 and machine.flops <= machine.rates.get("fp32", 0.0)
    return f"{question.precision} is no faster than fp32 on {machine.name}" if slow else ""


def precision_words(question: RunQuestion) -> str:
    """Return the precision as a line of a plan says it."""
    usual = {"fp32": "fp32 without TF32 (train's default)", "fp64": "fp64"}
    words = usual.get(question.precision, f"{question.precision} activations; weights and AdamW in fp32")
    return "; ".join(filter(None, (words, slow_precision(question))))


def better_precision(question: RunQuestion) -> str | None:
    """Return a precision of 16 bits for wider values, or the other one where the machine has a quicker rate for it."""
    rates = question.figures.rates
    usual = "fp16" if rates.get("fp16", 0.0) > rates.get("bf16", question.figures.flops) else "bf16"
    quicker = rates.get(usual, 0.0) > 1.5 * rates.get(question.precision, math.inf)
    return usual if question.value_bytes > 2 or quicker else None


def machine_words(question: RunQuestion) -> str:
    """Return the source of a machine's figures."""
    machine = question.figures
    if not machine.known:
        return f"{machine.flops / 1e12:.4g} Tflop/s assumed, give --machine"
    return f"{machine.name}, {'measured' if machine.measured else 'by its datasheet, not measured'}"


def epoch_steps(question: RunQuestion) -> int:
    return -(-question.images // question.images_per_step)


@dataclass(frozen=True)
class PlannedStep:
    """A step on `gpus` that have work: bytes of the GPU that needs most, seconds, and those of an epoch. `rebuilt`: the
    tensors that are recomputed, if any."""

    question: RunQuestion
    gpus: int
    memory: int
    seconds: float
    epoch_seconds: float
    rebuilt: MemoryChoice | None = None

    @property
    def values(self) -> dict[str, Any]:
        again, question = self.rebuilt, self.question
        return {
            "memory": self.memory,
            "gpu": question.limit,
            "fits": None if question.limit is None else self.memory <= question.limit,
            "recomputed": len(again.items) if again else 0,
            "recompute_percent": round(100 * again.extra, 2) if again else 0.0,
            "gpus": self.gpus,
            "gpus_asked": question.ranks,
            "gpus_per_node": question.figures.ranks_per_host,
            "images": question.images,
            "machine": machine_words(question),
            "milliseconds": milliseconds(self.seconds),
            "epoch_seconds": round(self.epoch_seconds, 6),
        }

    @property
    def memory_words(self) -> str:
        """The bytes of a GPU besides those of its context and libraries, and whether they fit by recomputing."""
        limit, again = self.question.limit, self.rebuilt
        if limit is None:
            return f"{size(self.memory)} a GPU, without CUDA's own; --machine or --gpu-memory says whether that fits"
        fits = f"{'fits' if self.memory <= limit else 'does NOT fit'}"
        if again and again.items:
            fits += f", recomputing {counted(len(again.items), 'tensor')}: {100 * again.extra:.0f} % more time"
        return f"{size(self.memory)} of {size(limit)} a GPU, without CUDA's own: {fits}"

    @property
    def gpu_words(self) -> str:
        """The GPUs at work and their nodes, and those that idle."""
        idle, node = self.question.ranks - self.gpus, self.question.figures.ranks_per_host
        words = f"{self.gpus:,} at work, on {counted(math.ceil(self.gpus / node), 'node')} of {node}"
        return words + f"; {idle:,} idle" * (idle > 0)

    @property
    def beside(self) -> str:
        """The rate at which files must come, where the predicted seconds of an epoch leave out reading."""
        question = self.question
        values = question.images * math.prod(question.shape) * question.network.bands
        rate = round(values / max(self.epoch_seconds, 1e-6))
        one, two = (f"{' '.join(count_parts(width * rate))}B/s of uint{8 * width}" for width in (1, 2))
        return f", if all GPUs together read {one}, {two}" * question.figures.has_free_core(self.gpus)

    def epoch_words(self, in_steps: bool = False) -> str:
        """Return the time of an epoch of images, and of how many steps."""
        steps = f" in {counted(epoch_steps(self.question), 'step')}" if in_steps and self.question.images > 1 else ""
        return f"{duration(self.epoch_seconds)} for {counted(self.question.images, 'image')}{steps}{self.beside}"
