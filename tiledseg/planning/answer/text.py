"""Figures of a plan as words, and parts of an answer as values and as lines of plain text of at most 80 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tiledseg.system.console import counted
from tiledseg.units import size

if TYPE_CHECKING:
    from tiledseg.planning.run.plan import RunPlan
    from tiledseg.planning.run.question import RunQuestion
    from tiledseg.planning.walk.choice import MemoryChoice

WIDTH = 80
DEFAULTS = " (train's defaults)"
PROPOSED = " (as many as the GPUs take; --images-per-step sets it)"
_COUNTS = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


class Row(NamedTuple):
    """A figure of a part: its `key` in JSON ("exact.bytes": the key "bytes" of the map "exact"), and its value. With a
    `label` it has a line of text too: the value by its `form` (of `format`; B: bytes, #: a count with a prefix), and a
    remark."""

    key: str
    value: Any
    label: str = ""
    form: str = ""
    remark: str = ""


class Section(NamedTuple):
    """A part of an answer: its values as JSON has them, and the same as text."""

    values: dict[str, Any]
    text: str


def listed(title: str, rows: Sequence[Row], below: Sequence[str] = ()) -> Section:
    """Return the part with a line for each row that has a label: labels to the left, values to the right."""
    values, cells = dict[str, Any](), list[tuple[str, str, str]]()
    for key, value, label, form, remark in rows:
        outer, _, inner = key.rpartition(".")
        (values.setdefault(outer, {}) if outer else values)[inner] = value
        number, prefix = words(value), ""
        if form in ("B", "#"):
            number, prefix = size(value).split() if form == "B" else count_parts(value)
        elif form:
            number = format(value, form)
        cells += [(label, number, f"{prefix} {remark}".strip())] if label else []
    labels, numbers = (max(len(row[i]) for row in cells) for i in range(2))
    lines = (f"{label.ljust(labels)}  {number.rjust(numbers)}  {remark}" for label, number, remark in cells)
    text = [title, *(wrapped(line, other=" " * (labels + numbers + 6)) for line in lines), *map(wrapped, below)]
    return Section(values, "\n".join(text))


def tabled(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    shown: Mapping[str, Callable[[Mapping[str, Any]], str]],
    below: Sequence[str] = (),
) -> str:
    """Return a title, a table of the rows, and lines below it. `shown`: head and text of each column."""
    cells = [tuple(shown), *(tuple(show(row) for show in shown.values()) for row in rows)]
    return "\n".join([wrapped(title, ""), columns(cells), *map(wrapped, below)])


def wrapped(text: str, first: str = "  ", other: str = "    ") -> str:
    """Break a long line into lines; they begin with `first`, and with `other`."""
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=other, break_on_hyphens=False)


def wrapped_lines(text: str) -> list[str]:
    """Break each line of a text into lines."""
    return [part for line in text.splitlines() for part in wrapped(line, "", "").splitlines()]


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first row is its head. The first column and remarks, a last column without a head, are
    aligned to the left. Remarks that are too long for a line stand below their rows."""
    widths = [max(map(len, column)) if column[0] else 0 for column in zip(*rows, strict=True)]
    cells = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    lines = ["  " + "  ".join(row).rstrip() for row in cells]
    if rows[0][-1] or max(map(len, lines)) <= WIDTH:
        return "\n".join(lines)
    pairs = zip(columns([row[:-1] for row in rows]).splitlines(), rows, strict=True)
    return "\n".join(filter(None, (part for line, row in pairs for part in (line, wrapped(row[-1], "    ")))))


def words(value: Any) -> str:
    """Return a number, or the numbers of a list as '8 x 8'."""
    return " x ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def count_parts(value: int) -> tuple[str, str]:
    """Return a number with the largest fitting prefix, ('1.53', 'T')."""
    return next(((f"{value / unit:.2f}", word) for unit, word in _COUNTS if value >= unit), (str(value), ""))


def milliseconds(seconds: float) -> float:
    """Return milliseconds to four decimals."""
    return round(1000 * seconds, 4)


def time_of(milliseconds: float) -> str:
    """Return a time to four digits, '814 ms' or '1.604 s'."""
    return f"{milliseconds:.4g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.4g} s"


def duration(seconds: float) -> str:
    """Return seconds in days, h, min, s or ms, whichever reads best."""
    for unit, word in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {word}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.4g} ms"


def rounded(question: RunQuestion, seconds: float) -> float:
    """Return a predicted time, to two digits where the machine was not measured."""
    return seconds if question.figures.measured else float(f"{seconds:.2g}")


def network_text(question: RunQuestion) -> str:
    """Return bands, classes, and lines of the network and its options, which may be the defaults of `train`."""
    network = question.network
    usual = question.keyed and type(network)().in_words.splitlines()[-1] == network.in_words.splitlines()[-1]
    counts = f"{network.bands} bands, {network.classes} classes"
    return f"{counts}\n{network.in_words}" + DEFAULTS * usual


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
    return "; ".join(filter(None, (slow_precision(question), words)))


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
    """A step on the `gpus` that have work. `memory`: bytes of the GPU that needs most. `items`: its images, or with
    stages its micro-batches. `rebuilt`: the tensors that are recomputed, if any."""

    question: RunQuestion
    gpus: int
    memory: int
    seconds: float
    epoch_seconds: float
    items: int
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
    def duration(self) -> str:
        return duration(rounded(self.question, self.seconds))

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
        """The GPUs at work and their nodes, those that idle, and a last step of fewer images."""
        idle, node = self.question.ranks - self.gpus, self.question.figures.ranks_per_host
        words = f"{self.gpus:,} at work, on {counted(math.ceil(self.gpus / node), 'node')} of {node}"
        images, last = self.question.images_per_step, self.question.images % (self.question.images_per_step or 1)
        fewer = f"; an epoch's last step has {last} of {images} images, and idle GPUs" * (last > 0)
        return words + f"; {idle:,} idle" * (idle > 0) + fewer

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
        time = duration(rounded(self.question, self.epoch_seconds))
        return f"{time} for {counted(self.question.images, 'image')}{steps}{self.beside}"


def step_of(question: RunQuestion, plan: RunPlan) -> PlannedStep:
    """Return the step of a plan."""
    cost, steps = plan.cost, epoch_steps(question)
    epoch, items = steps * cost.seconds, question.images_per_step
    return PlannedStep(question, cost.ranks, cost.memory, cost.seconds, epoch, items, plan.rebuilt)


def rehearsal_words(figures: Mapping[str, Any]) -> str:
    """Return the figures of a rehearsal as a table, then the warnings, and what would fail."""
    rows = {
        "network": "{network}",
        "halo mode": "{mode}",
        "parts of the first step": "{tiles}, of which {idle} ranks have none",
        "memory of a step": "{memory} of {gpu_memory} on the rank that needs most",
        "rasters a rank opens": "at most {rasters}",
        "communicators a rank is in": "at most {groups}",
        "messages, forward and back": "{messages} messages to {peers} peers, {bytes}: the most of a rank",
        "sums over ranks": "at most {sums}, {summed}: of gradients, and of norms",
        "open files": "{open_files}; rank 0 {open_files_of_root}",
        "labels": "values of {labels_read} of {label_blocks} blocks read, the middle one of each file first",
    }
    width = max(map(len, rows))
    shown = {**figures, **{name: size(figures[name]) for name in ("memory", "gpu_memory", "bytes", "summed")}}
    table = [wrapped(w.format(**shown), f"  {name:{width}}  ", " " * (width + 4)) for name, w in rows.items()]
    lines = [f"{figures['ranks']} ranks rehearsed in {figures['seconds']:.1f} s", *table]
    nothing = "nothing found that would fail in messages, memory, rasters, open files, output folder, and "
    nothing += "{labels_read} of {label_blocks} blocks of labels"
    found = [f"warning: {line}" for line in figures["warnings"]]
    found += [f"would fail: {line}" for line in figures["fails"]] or [nothing.format(**figures)]
    return "\n".join([*lines, *(wrapped(line, "") for line in found)])
