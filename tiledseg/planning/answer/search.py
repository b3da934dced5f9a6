"""`plan --search` and `plan --scaling`: the best settings for a cluster, and the time on each number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tiledseg.errors import ConfigError, GeometryError
from tiledseg.planning.answer.modes import basis_part, better_precision, with_step
from tiledseg.planning.answer.report import plan_tiling
from tiledseg.planning.answer.table import JOB, PROPOSED, beside, idle_words, network_text, precision_words, steps_words
from tiledseg.planning.answer.text import columns, figures_basis, time_of, words, wrapped, wrapped_lines
from tiledseg.planning.run.blocks import BlocksAsked
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.search import FREE, TERMS, Discarded, Priced, Pricing, Searched, search
from tiledseg.planning.walk.cost_model import disk_of, store_of
from tiledseg.system.console import counted
from tiledseg.units import size

_WHY = {
    "memory": "do not fit the memory",
    "not exact": "would change what a norm sees",
    "not possible": "cannot be",
    "slower": "are slower (most were only estimated)",
}
COLUMNS = ("scaling", "gpus", "images_per_step", "step_seconds", "epoch_seconds", "efficiency", "limit", "settings")
_STUDIES = (
    "strong: the step keeps its images, and the result; weak: its images grow with the GPUs, up to those of an epoch, "
    "in the settings of the first number"
)


def searchable(question: RunQuestion) -> RunQuestion:
    """Return the question with the stores of its machine, and the images of a step that a plan without a search has.
    Raises ConfigError where a search lacks a figure."""
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
    asked = with_step(question, tiles)
    if several:  # the same number of GPUs an image, where that takes few images off
        most, ranks = asked.images_per_step, asked.ranks
        even = next((images for images in range(most, most * 3 // 4, -1) if ranks % images == 0), most)
        asked = replace(asked, images_per_step=even)
    return with_stores(asked)


def with_stores(asked: RunQuestion) -> RunQuestion:
    """Return the question with the stores of its machine, where they are known. Blocks have a disk. Tensors of autograd
    have the memory of a GPU's host, or a disk where ranks have no device of their own."""
    machine = asked.machine
    if machine is None or asked.recompute != "auto":
        return asked
    disk = disk_of(machine)
    blocks = asked.blocks if disk is None else BlocksAsked(None, True, store=disk)
    return replace(asked, store=store_of(machine), blocks=blocks)


def _head(question: RunQuestion) -> dict[str, Any]:
    machine = {"profile": question.figures.name, "measured": question.figures.measured}
    return basis_part(question, question.ranks) | {"size": list(question.shape), "machine": machine}


def _machine(part: dict[str, Any]) -> str:
    epoch = beside(part | (part["best"] if "best" in part else part["points"])[0])
    rate = f"; the first row's epoch holds{epoch[1:]}" if epoch else ""
    return f"machine: {figures_basis(part['machine'])}{rate}"


def search_part(question: RunQuestion, result: Searched, proposed: bool) -> dict[str, Any]:
    """Return the settings; bytes, milliseconds, seconds an epoch. `proposed`: nobody has set the images of a step."""
    return _head(question) | {
        "proposed": proposed,
        "network": network_text(question),
        "gpus": question.ranks,
        "images_per_step": question.images_per_step,
        "memory": question.limit,
        "precision": question.precision,
        "better_precision": better_precision(question),
        "candidates": result.candidates,
        "discarded": result.discarded,
        "best": [row_of(question, each) for each in result.best],
        "other": None if result.other is None else row_of(question, result.other),
        "reason": result.reason,
    }


def row_of(question: RunQuestion, priced: Priced) -> dict[str, Any]:
    candidate, plan = priced.candidate, priced.plan
    return {
        "settings": candidate.in_words,
        "grid": list(candidate.grid),
        "parallel": candidate.keys(plan),
        "memory_keys": memory_keys(question, priced),
        "away": plan.offloaded.kept if plan.offloaded else 0,
        "recomputes": plan.rebuilt is not None or candidate.parallel.recompute[0] != "never",
        "ranks": priced.ranks,
        "milliseconds": round(1000 * priced.seconds, 6),
        "epoch_seconds": round(-(-question.images // question.images_per_step) * priced.seconds, 6),
        "by_term": {name: round(1000 * seconds, 4) for name, seconds in zip(TERMS, priced.time, strict=True)},
        "memory": priced.memory,
    }


def memory_keys(question: RunQuestion, priced: Priced) -> dict[str, Any]:
    """Return the keys of the group `memory` besides a budget, and besides a store that is a folder on the nodes."""
    if priced.plan.blocks:
        return {"blocks": list(priced.plan.blocks.shape)}
    if priced.plan.offloaded is None:
        return {}
    return {"offload": "auto"} | ({"store": "host"} if question.figures.has_devices else {})


def search_table(part: dict[str, Any]) -> str:
    """Return a row for each of the best, one for the best of another kind, the discarded settings, and the reason."""
    rows: list[tuple[str, ...]] = [("#", "step", "epoch", "computing", "communication", "waiting", "memory", "")]
    for place, row in enumerate(part["best"], 1):
        rows.append(_cells(str(place), row, "chosen" * (place == 1)))
    if part["other"] and part["other"] not in part["best"]:
        rows.append(_cells("-", part["other"], "best of another kind"))
    why = ", ".join(f"{count:,} {_WHY[word]}" for word, count in part["discarded"].items())
    gain = "half the memory, and less" if part["precision"] in ("fp32", "fp64") else "less"
    other = f"; --precision {part['better_precision']} takes {gain} time" if part["better_precision"] else ""
    remarks = [
        _machine(part),
        f"precision: {precision_words(part['precision'], part)}{other}",
        f"{part['candidates']:,} settings: {why or 'all are above'}",
        f"choice: {part['reason']}",
    ]
    busy, images = part["best"][0]["ranks"], f"{part['images']} images of {words(part['size'])} px"
    nodes = f"{counted(-(-busy // part['gpus_per_node']), 'node')} of {part['gpus_per_node']}"
    remarks += [f"GPUs: {busy:,} at work, on {nodes}{idle_words({**part, 'gpus': busy})}", f"job: {JOB}"]
    title = (
        f"search: {images}, {part['images_per_step']} a step{PROPOSED * part['proposed']}: "
        f"{steps_words(part)} an epoch, on {part['gpus']} GPUs of "
        f"{size(part['memory'])}; all rows fit"
    )
    network = wrapped_lines(part["network"])
    return "\n".join([wrapped(title, ""), *network, "", columns(rows), *map(wrapped, remarks)])


def _cells(place: str, row: dict[str, Any], remark: str) -> tuple[str, ...]:
    terms, keys = row["by_term"], row["memory_keys"]
    talking = terms["messages"] + terms["all_reduce"]
    parts = row["milliseconds"] - talking - terms["waiting"], talking, terms["waiting"]
    host = f"memory.offload auto, memory.store host for {size(row['away'])}"
    away = host if "store" in keys else "a store" if keys else ""
    remarks = ", ".join(filter(None, (remark, "recomputing" if row["recomputes"] else "", away)))
    return (
        place,
        *map(time_of, (row["milliseconds"], 1000 * row["epoch_seconds"], *parts)),
        size(row["memory"]),
        f"{row['settings']}{': ' * bool(remarks)}{remarks}",
    )


class Point(NamedTuple):
    """A number of ranks: images of a step, its settings, `efficiency` per rank (1: as on the first number), and the
    term that takes most of the loss; None where nothing is lost."""

    ranks: int
    images: int
    priced: Priced
    efficiency: float
    limit: str | None


def scaling(question: RunQuestion, numbers: Sequence[int], host: int) -> dict[str, list[Point]]:
    """Return a strong and a weak scaling study over numbers of ranks, both in the mode that is best on the first: an
    efficiency compares a mode with itself. Strong: the step keeps its images, so the result stays the same, and each
    number has its best settings. Weak: the images of a step grow with the ranks, up to those of an epoch, and the
    settings of an image stay those of the first number."""
    images = question.images_per_step
    first = search(replace(question, ranks=numbers[0]), host).winner
    mode = {name: getattr(first.candidate.parallel, name) for name in ("halo", "stages")}
    alike, free = replace(question, parallel=replace(question.parallel, **mode)), FREE - set(mode)
    strong = [(numbers[0], images, first)]
    strong += [(ranks, images, search(replace(alike, ranks=ranks), host, free=free).winner) for ranks in numbers[1:]]
    weak = strong[:1]
    for ranks, more in ((ranks, images * ranks // numbers[0]) for ranks in numbers[1:]):
        if more <= question.images:
            result = Pricing(replace(question, ranks=ranks, images_per_step=more)).price(first.candidate)
            if isinstance(result, Discarded):
                raise ConfigError(f"{first.candidate.in_words} on {ranks} ranks: {result.reason}")
            weak.append((ranks, more, result))
    return {name: [_point(rows[0], *row) for row in rows] for name, rows in (("strong", strong), ("weak", weak))}


def _point(first: tuple[int, int, Priced], ranks: int, images: int, priced: Priced) -> Point:
    """Return a point, whose ranks would have `times` less work each than on the first number, were none lost."""
    times, start = ranks / first[0] * first[1] / images, first[2]
    lost = {name: mine - one / times for name, mine, one in zip(TERMS, priced.time, start.time, strict=True)}
    most, idle = max(lost, key=lambda name: lost[name]), 1 - priced.ranks / ranks
    limit = TERMS[most] if lost[most] > 0.001 * priced.seconds else None
    if limit and most in ("forward", "backward"):
        limit = f"{100 * idle:.2g} % of the ranks idle" if idle > 0.05 else "computing: halos, uneven shares"
    return Point(ranks, images, priced, start.seconds / times / priced.seconds, limit)


def parse_range(text: str) -> tuple[int, ...]:
    """Parse 'A:B' into the GPU counts A, 2A, 4A, ..., B. Raises ConfigError for anything else."""
    ends = text.split(":")
    if len(ends) != 2 or not all(end.isascii() and end.isdigit() and len(end) < 8 for end in ends):
        raise ConfigError(f"--scaling is '{text}'; give the fewest and the most GPUs, 64:1536 say")
    first, last = map(int, ends)
    if not 1 <= first < last <= 1_000_000:
        raise ConfigError(f"--scaling is '{text}'; give two numbers that rise, from 1 to 1000000")
    return (*(first << power for power in range(20) if first << power < last), last)


def scaling_part(question: RunQuestion, numbers: tuple[int, ...]) -> dict[str, Any]:
    """Return seconds of a step and of an epoch; efficiency 1 at the first number."""
    studies = scaling(question, numbers, question.figures.ranks_per_host)
    rows = []
    for name, point in ((name, point) for name, study in studies.items() for point in study if len(study) > 1):
        seconds = point.priced.seconds
        epoch = -(-question.images // point.images) * seconds
        figures = point.ranks, point.images, round(seconds, 6), round(epoch, 6), round(point.efficiency, 4)
        values = name, *figures, point.limit or "", point.priced.candidate.in_words
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return _head(question) | {"points": rows}


def scaling_table(part: dict[str, Any]) -> str:
    """Return strong, then weak scaling: a row for each number."""
    rows = [("scaling", "GPUs", "images a step", "step", "epoch", "efficiency", "")]
    for row in part["points"]:
        limit = f"; limited by {row['limit']}" if row["limit"] else ""
        rows.append(
            (
                row["scaling"],
                f"{row['gpus']:,}",
                f"{row['images_per_step']:,}",
                time_of(1000 * row["step_seconds"]),
                time_of(1000 * row["epoch_seconds"]),
                f"{100 * row['efficiency']:.1f} %",
                row["settings"] + limit,
            )
        )
    images = f"{part['images']} images of {words(part['size'])} px"
    title = wrapped(f"scaling: {images} an epoch; efficiency 1 is that of the first number", "")
    remarks, most = [_machine(part), _STUDIES], {row["scaling"]: row["gpus"] for row in part["points"]}
    if most.get("weak") != most["strong"]:
        ends = f"weak scaling ends at {most['weak']:,} GPUs" if "weak" in most else "there is no weak scaling"
        remarks.append(f"{ends}: with more GPUs a step would have more images than an epoch; give more --images")
    return "\n".join([title, columns(rows), *map(wrapped, remarks)])
