"""`plan --search` and `plan --scaling`: the best settings for a cluster, and the time on each number of GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tiledseg.errors import ConfigError, GeometryError
from tiledseg.planning.answer import text
from tiledseg.planning.answer.modes import with_step
from tiledseg.planning.answer.report import plan_tiling
from tiledseg.planning.answer.text import Section, epoch_steps, network_text, rounded, step_of, time_of, words
from tiledseg.planning.run.blocks import BlockSettings
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.search import TERMS, Discarded, Priced, Searched, price, search
from tiledseg.planning.walk.cost_model import disk_of, store_of
from tiledseg.units import size

_STUDIES = (
    "strong: the step keeps its images, and the result; weak: its images grow with the GPUs, up to those of an epoch, "
    "in the settings of the first number"
)


def searchable(question: RunQuestion) -> RunQuestion:
    """Return the question with the images of a step as a plan without a search has them, and with the stores of its
    machine: a disk for blocks; for tensors of autograd the memory of a GPU's host, or the disk where ranks have no
    device of their own. Raises ConfigError where a search lacks a figure."""
    machine = question.figures
    if not machine.known:
        raise ConfigError(
            "--search ranks by predicted time, but no machine is known; give --machine summit say, or a file of "
            "plan --calibrate"
        )
    if not question.ranks:
        raise ConfigError("--search spreads a run over GPUs, but --gpus is not given; give their number")
    if question.limit is None:
        raise ConfigError(f"--search fits runs to a memory, which the profile {machine.name} lacks; give --gpu-memory")
    try:
        several = question.images > 1 and not question.images_per_step
        tiles = len(plan_tiling(question)) if several else 1
    except GeometryError:  # a norm needs an image whole that does not fit: a search may take it in blocks
        tiles = question.ranks
    of_step = with_step(question, tiles)
    if several:  # fewer images, by a quarter at most, give each the same number of GPUs
        most, ranks = of_step.images_per_step, of_step.ranks
        even = next((images for images in range(most, most * 3 // 4, -1) if ranks % images == 0), most)
        of_step = replace(of_step, images_per_step=even)
    disk = disk_of(machine)
    blocks = of_step.blocks if disk is None else BlockSettings(None, True, store=disk)
    return replace(of_step, store=store_of(machine), blocks=blocks)


def search_part(question: RunQuestion, result: Searched, proposed: bool) -> Section:
    """Return a row for each of the best settings, one for the best of another kind, and the reason of the choice;
    bytes, milliseconds, seconds an epoch. `proposed`: the plan has chosen the images of a step."""
    best = [_row(question, each) for each in result.best]
    other = None if result.other is None else _row(question, result.other)
    narrow, winner = text.better_precision(question), step_of(question, result.winner.plan)
    values = {
        "network": network_text(question),
        "size": list(question.shape),
        "machine": {"profile": question.figures.name, "measured": question.figures.measured},
        "gpus": question.ranks,
        "images": question.images,
        "images_per_step": question.images_per_step,
        "memory": question.limit,
        "precision": question.precision,
        "better_precision": narrow,
        "candidates": result.candidates,
        "best": best,
        "other": other,
        "reason": result.reason,
    }
    rows = [row | {"place": str(place), "chosen": "chosen" * (place == 1)} for place, row in enumerate(best, 1)]
    if other and other not in best:
        rows.append(other | {"place": "-", "chosen": "best of another kind"})
    title = (
        f"search: {question.images} images of {words(question.shape)} px, {question.images_per_step} a step"
        f"{text.PROPOSED * proposed}: {epoch_steps(question)} steps an epoch, on {question.ranks} GPUs of "
        f"{size(question.memory)}; all rows fit"
    )

    def shown(time: float) -> str:
        return time_of(rounded(question, time))

    columns = {
        "#": lambda row: row["place"],
        "step": lambda row: shown(row["milliseconds"]),
        "epoch": lambda row: shown(1000 * row["epoch_seconds"]),
        "computing": lambda row: shown(row["milliseconds"] - _communication(row) - row["by_term"]["waiting"]),
        "communication": lambda row: shown(_communication(row)),
        "pipeline waits": lambda row: shown(row["by_term"]["waiting"]),
        "memory": lambda row: size(row["memory"]),
        "": _remarks,
    }
    if not any(row["by_term"]["waiting"] for row in rows):
        del columns["pipeline waits"]
    coarse, own = "; times to two digits" * (not question.figures.measured), question.limit == question.figures.memory
    below = [
        f"epoch of the first row: {winner.epoch_words(in_steps=True)}",
        f"machine: {text.machine_words(question)}{coarse}",
        f"memory: without CUDA's own{', 1 to 2 GiB, for which --gpu-memory leaves room' * own}",
        f"network: {network_text(question).replace(chr(10), ', ')}",
        f"precision: {f'--precision {narrow} takes less time; ' if narrow else ''}{text.precision_words(question)}",
        f"settings: {result.candidates:,} sorted by an estimate; the dozen first that fit were planned, these are best",
        f"choice: {result.reason}",
        f"GPUs: {winner.gpu_words}",
    ]
    return Section(values, text.tabled(title, rows, columns, below))


def _row(question: RunQuestion, priced: Priced) -> dict[str, Any]:
    candidate, plan, cost = priced.candidate, priced.plan, priced.plan.cost
    return {
        "settings": candidate.in_words,
        "grid": list(candidate.grid),
        "parallel": candidate.keys(plan),
        "memory_keys": memory_keys(question, priced),
        "away": plan.offloaded.kept if plan.offloaded else 0,
        "recomputes": plan.rebuilt is not None or candidate.parallel.recompute[0] != "never",
        "ranks": cost.ranks,
        "milliseconds": round(1000 * cost.seconds, 6),
        "epoch_seconds": round(epoch_steps(question) * cost.seconds, 6),
        "by_term": {name: text.milliseconds(seconds) for name, seconds in zip(TERMS, cost.time, strict=True)},
        "memory": cost.memory,
    }


def memory_keys(question: RunQuestion, priced: Priced) -> dict[str, Any]:
    """Return the keys of the group `memory` besides a budget, and besides a store that is a folder on the nodes."""
    if priced.plan.blocks:
        return {"blocks": list(priced.plan.blocks.shape)}
    if priced.plan.offloaded is None:
        return {}
    return {"offload": "auto"} | ({"store": "host"} if question.figures.has_devices else {})


def _communication(row: Mapping[str, Any]) -> float:
    return row["by_term"]["messages"] + row["by_term"]["all_reduce"]


def _remarks(row: Mapping[str, Any]) -> str:
    keys = row["memory_keys"]
    host = f"memory.offload auto, memory.store host for {size(row['away'])}"
    away = host if "store" in keys else "a store" if keys else ""
    remarks = ", ".join(filter(None, (row["chosen"], "recomputing" if row["recomputes"] else "", away)))
    return f"{row['settings']}{': ' * bool(remarks)}{remarks}"


class Point(NamedTuple):
    """A number of ranks in a scaling study: images of a step, the settings, and the `efficiency` per rank, by that on
    the first number. `limit`: the term that loses most time; None where nothing is lost."""

    ranks: int
    images: int
    priced: Priced
    efficiency: float
    limit: str | None


def scaling(question: RunQuestion, numbers: Sequence[int], host: int) -> dict[str, list[Point]]:
    """Return a strong and a weak scaling study over numbers of ranks. Both keep the mode that is best on the first
    number, so an efficiency compares a mode with itself. Strong: the step keeps its images, so the result stays the
    same, and each number has its best settings. Weak: the images of a step grow with the ranks, up to an epoch's, and
    the settings of an image stay those of the first number."""
    images = question.images_per_step
    first = search(replace(question, ranks=numbers[0]), host).winner
    mode, strong = first.candidate.parallel, [(numbers[0], images, first)]
    for ranks in numbers[1:]:
        strong.append((ranks, images, search(replace(question, ranks=ranks), host, mode.halo, mode.stages).winner))
    weak = strong[:1]
    for ranks, more in ((ranks, images * ranks // numbers[0]) for ranks in numbers[1:]):
        if more <= question.images:
            result = price(replace(question, ranks=ranks, images_per_step=more), first.candidate)
            if isinstance(result, Discarded):
                raise ConfigError(f"{first.candidate.in_words} on {ranks} ranks: {result.reason}")
            weak.append((ranks, more, result))
    return {name: [_point(rows[0], *row) for row in rows] for name, rows in (("strong", strong), ("weak", weak))}


def _point(first: tuple[int, int, Priced], ranks: int, images: int, priced: Priced) -> Point:
    """Return a point. Without losses a term would take 1 / `times` of its seconds on the first number."""
    times, start, cost = ranks / first[0] * first[1] / images, first[2].plan.cost, priced.plan.cost
    lost = {name: mine - one / times for name, mine, one in zip(TERMS, cost.time, start.time, strict=True)}
    most, idle = max(lost, key=lambda name: lost[name]), 1 - cost.ranks / ranks
    limit = TERMS[most] if lost[most] > 0.001 * cost.seconds else None
    if limit and most in ("forward", "backward"):
        limit = f"{100 * idle:.2g} % of the ranks idle" if idle > 0.05 else "computing: halos, uneven shares"
    return Point(ranks, images, priced, start.seconds / times / cost.seconds, limit)


def parse_range(text: str) -> tuple[int, ...]:
    """Parse 'A:B' into the GPU counts A, 2A, 4A, ..., B. Raises ConfigError for anything else."""
    ends = text.split(":")
    if len(ends) != 2 or not all(end.isascii() and end.isdigit() and len(end) < 8 for end in ends):
        raise ConfigError(f"--scaling is '{text}'; give the fewest and the most GPUs, 64:1536 say")
    first, last = map(int, ends)
    if not 1 <= first < last <= 1_000_000:
        raise ConfigError(f"--scaling is '{text}'; give two numbers that rise, from 1 to 1000000")
    return (*(first << power for power in range(20) if first << power < last), last)


def scaling_part(question: RunQuestion, numbers: tuple[int, ...]) -> Section:
    """Return strong, then weak scaling, a row for each number: seconds of a step and of an epoch; efficiency 1 at the
    first number."""
    studies, rows = scaling(question, numbers, question.figures.ranks_per_host), list[dict[str, Any]]()
    for name, point in ((name, point) for name, study in studies.items() for point in study if len(study) > 1):
        seconds, steps = point.priced.plan.cost.seconds, -(-question.images // point.images)
        values = {
            "scaling": name,
            "gpus": point.ranks,
            "images_per_step": point.images,
            "step_seconds": round(seconds, 6),
            "epoch_seconds": round(steps * seconds, 6),
            "efficiency": round(point.efficiency, 4),
            "limit": point.limit or "",
            "settings": point.priced.candidate.in_words,
        }
        rows.append(values)
    columns = {
        "scaling": lambda row: row["scaling"],
        "GPUs": lambda row: f"{row['gpus']:,}",
        "images a step": lambda row: f"{row['images_per_step']:,}",
        "step": lambda row: time_of(1000 * row["step_seconds"]),
        "epoch": lambda row: time_of(1000 * row["epoch_seconds"]),
        "efficiency": lambda row: f"{100 * row['efficiency']:.1f} %",
        "": lambda row: row["settings"] + (f"; limited by {row['limit']}" if row["limit"] else ""),
    }
    first = studies["strong"][0].priced
    epoch, most = step_of(question, first.plan).epoch_words(), {row["scaling"]: row["gpus"] for row in rows}
    below = [f"epoch of the first row: {epoch}; {text.machine_words(question)}", _STUDIES]
    if most.get("weak") != most["strong"]:
        ends = f"weak scaling ends at {most['weak']:,} GPUs" if "weak" in most else "there is no weak scaling"
        below.append(f"{ends}: with more GPUs a step would have more images than an epoch; give more --images")
    images = f"{question.images} images of {words(question.shape)} px"
    title = f"scaling: {images} an epoch; efficiency 1 is that of the first number"
    machine = {"profile": question.figures.name, "measured": question.figures.measured}
    values = {"size": list(question.shape), "images": question.images, "machine": machine, "points": rows}
    return Section(values, text.tabled(title, rows, columns, below))
