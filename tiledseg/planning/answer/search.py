"""`plan --search`: the best settings for a cluster as plain values, as a table, and as the job of the winner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiledseg.errors import ConfigError
from tiledseg.planning.answer.text import columns, size, wrapped
from tiledseg.planning.memory.store import disk_of, store_of
from tiledseg.planning.question import Question, run_question
from tiledseg.planning.run.blocks import BlocksAsked
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.search.best import TERMS, Searched, search
from tiledseg.planning.search.price import Priced

_WHY = {
    "memory": "do not fit the memory",
    "not exact": "would change what a norm sees",
    "not possible": "cannot be",
    "slower": "are slower, most by an estimate alone",
}
_HEAD = ("settings", "step", "epoch", "computing", "communication", "waiting", "memory", "")


def searchable(question: Question, grid: tuple[int, int] | None) -> Question:
    """Return the question with that grid, None for any. Raises ConfigError where a search needs to know more."""
    if not question.machine.known:
        raise ConfigError(
            "--search ranks by predicted time, but no machine is known; give --machine summit say, or a file of "
            "plan --calibrate"
        )
    if question.gpus is None:
        raise ConfigError("--search spreads a run over GPUs, but --gpus is not given; give their number")
    if question.gpu_memory is None:
        raise ConfigError(
            f"--search fits runs to a memory, which the profile {question.machine.name} lacks; give --gpu-memory"
        )
    return replace(question, grid=grid)


def searched(question: Question, images_per_step: int) -> Searched:
    """The best settings for the GPUs of a `searchable` question, a step of so many images. Raises ConfigError where
    nothing can be."""
    assert question.gpus is not None, "searchable"
    asked = run_question(question, Parallelism(), question.gpus, question.grid)
    asked = with_stores(replace(asked, images_per_step=images_per_step))
    return search(asked, question.machine.ranks_per_host)


def with_stores(asked: RunQuestion) -> RunQuestion:
    """The question with what its machine's stores may take, where they are known: a disk blocks, and the memory of a
    GPU's host, or a disk where ranks have no device of their own, what autograd keeps."""
    assert asked.machine is not None, "searchable"
    if not asked.machine.known or asked.recompute != "auto":
        return asked
    disk = disk_of(asked.machine)
    blocks = asked.blocks if disk is None else BlocksAsked(None, in_file=True, store=disk)
    return replace(asked, store=store_of(asked.machine), blocks=blocks)


def search_part(question: Question, images_per_step: int, found: Searched) -> dict[str, Any]:
    """Bytes, milliseconds, seconds an epoch."""
    machine = question.machine
    return {
        "size": list(question.size),
        "gpus": question.gpus,
        "images": question.images,
        "images_per_step": images_per_step,
        "machine": {"profile": machine.name, "measured": machine.measured},
        "memory": question.gpu_memory,
        "candidates": found.candidates,
        "discarded": found.discarded,
        "examples": {why: f"{each.candidate.in_words}: {each.reason}" for why, each in found.examples.items()},
        "best": [_row(question, images_per_step, each) for each in found.best],
        "other": None if found.other is None else _row(question, images_per_step, found.other),
        "reason": found.reason,
    }


def _row(question: Question, images_per_step: int, priced: Priced) -> dict[str, Any]:
    candidate, time = priced.candidate, priced.time
    return {
        "settings": priced.in_words,
        "grid": list(candidate.grid),
        "parallel": candidate.keys(priced.plan),
        "memory_keys": memory_keys(question, priced),
        "away": priced.plan.offloaded.kept if priced.plan.offloaded else 0,
        "recomputes": priced.plan.rebuilt is not None or candidate.recompute != "never",
        "ranks": priced.ranks,
        "milliseconds": round(1000 * priced.seconds, 6),
        "epoch_seconds": round(steps(question.images, images_per_step) * priced.seconds, 6),
        "by_term": {name: round(1000 * getattr(time, name), 4) for name in TERMS},
        "memory": priced.memory,
    }


def memory_keys(question: Question, priced: Priced) -> dict[str, Any]:
    """The keys of the group `memory` besides a budget, and besides a store that is a folder on the nodes."""
    blocks = priced.plan.blocks
    if blocks:
        return {"blocks": list(blocks.shape)}
    if priced.plan.offloaded is None:
        return {}
    return {"offload": "auto"} | ({"store": "host"} if question.machine.has_devices else {})


def steps(images: int, images_per_step: int) -> int:
    """Of an epoch; the last one may have fewer images."""
    return -(-images // images_per_step)


def search_table(part: dict[str, Any]) -> str:
    """A row for each of the best, one for the best of another kind, what was discarded and why, and the reason."""
    rows = [_HEAD, *(_cells(row, "chosen" * (not place)) for place, row in enumerate(part["best"]))]
    if part["other"] and part["other"] not in part["best"]:
        rows.append(_cells(part["other"], "best of another kind"))
    why = ", ".join(f"{count:,} {_WHY[word]}" for word, count in part["discarded"].items())
    machine, height_width = part["machine"], " x ".join(map(str, part["size"]))
    job = f"{part['images']} images of {height_width} px, {part['images_per_step']} a step, on {part['gpus']} GPUs"
    basis = "measured" if machine["measured"] else "by datasheets and assumed shares of them, not measured"
    return "\n".join(
        [
            f"search: {job} of {size(part['memory'])}",
            columns(rows),
            wrapped(f"machine: {machine['profile']}, {basis}"),
            wrapped(f"{part['candidates']:,} settings: {why or 'all are above'}"),
            wrapped(f"choice: {part['reason']}"),
        ]
    )


def _cells(row: dict[str, Any], remark: str) -> tuple[str, ...]:
    terms, again = row["by_term"], "recomputing" if row["recomputes"] else ""
    talking = terms["messages"] + terms["norms"] + terms["all_reduce"] + terms["copies"]
    shown = (row["milliseconds"], talking, terms["waiting"])
    step, talk, wait = (f"{value:.4g} ms" for value in shown)
    rest = f"{row['milliseconds'] - talking - terms['waiting']:.4g} ms"
    keys = row["memory_keys"]
    host = f"memory.offload auto, memory.store host for {size(row['away'])}"
    away = host if "store" in keys else "a store" if keys else ""
    remarks = ", ".join(filter(None, (remark, again, away)))
    return row["settings"], step, f"{row['epoch_seconds']:.4g} s", rest, talk, wait, size(row["memory"]), remarks
