"""What a job of many ranks would meet, found by one process: by its configuration, by its ranks' set-up, by limits."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass

from tiledseg.comm.connections import open_files_needed, store_operations
from tiledseg.comm.watching.verdict import name_ranks
from tiledseg.training.preparing.compiling import why_uncompiled
from tiledseg.training.preparing.preparation import Preparation
from tiledseg.training.rehearsal.walk import walk
from tiledseg.units.widths import SINGLE_BYTES


@dataclass(frozen=True)
class Rehearsal:
    """`fails`: why the job would end, a line each; `warnings`: what it would waste. Bytes are those of one rank: of a
    step, and of the messages and sums of its passes on each size of image."""

    ranks: int
    mode: str
    mesh: str
    tiles: int
    idle: int
    memory: int
    rasters: int
    groups: int
    peers: int
    messages: int
    bytes: int
    sums: int
    summed: int
    open_files: int
    open_files_of_root: int
    store_operations: int
    seconds: float
    fails: tuple[str, ...]
    warnings: tuple[str, ...]


def rehearse(preparation: Preparation, ranks: int, per_node: int, gpu_memory: int) -> Rehearsal:
    """Of a run that has been prepared for so many ranks. Raises InputError where a rank's own set-up is refused."""
    begun = time.perf_counter()
    walked = walk(preparation, ranks, per_node)
    spread, memory = preparation.plan.spread, preparation.plan.memory
    files, root = (open_files_needed(ranks, keeps, walked.peers) for keeps in (False, True))
    idle = [rank for rank, parts in enumerate(walked.parts) if not parts]
    notes = [f"{len(idle)} of {ranks} ranks have no part of the first step: {name_ranks(idle)}"] if idle else []
    if preparation.question.value_bytes < SINGLE_BYTES and walked.messages:
        notes.append(f"bytes of messages are those of fp32: up to twice what {preparation.recipe.precision} sends")
    return Rehearsal(
        ranks,
        spread.in_words,
        str(spread.mesh),
        sum(walked.parts),
        len(idle),
        memory,
        max(walked.rasters),
        walked.groups,
        walked.peers,
        walked.messages,
        walked.bytes,
        walked.sums,
        walked.summed,
        files,
        root,
        store_operations(ranks, walked.groups, walked.peers),
        time.perf_counter() - begun,
        (*_uncompiled(preparation), *_too_large(preparation, gpu_memory), *_files(root), *walked.faults[:5]),
        (*preparation.warnings, *notes),
    )


def _uncompiled(preparation: Preparation) -> list[str]:
    refused = why_uncompiled(preparation)
    return [refused] if refused else []


def _too_large(preparation: Preparation, gpu_memory: int) -> list[str]:
    needed = preparation.plan.memory
    if needed <= gpu_memory:
        return []
    return [
        f"a step needs {needed / 2**30:.2f} GiB on the rank that needs most, of {gpu_memory / 2**30:.2f} GiB; use a "
        "finer tiling.grid, more ranks an image, or memory.budget"
    ]


def _files(root: int) -> list[str]:
    """By the limit of this machine, which is to be like those of the job."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= root:
        return []
    return [f"rank 0 needs {root} open files, of {hard} that are allowed here; raise the limit (ulimit -n)"]


def in_words(found: Rehearsal) -> str:
    """A table, then what would fail, and the warnings."""
    rows = (
        ("halo mode", found.mode),
        ("mesh", found.mesh),
        ("parts of the first step", f"{found.tiles}, on {found.ranks - found.idle} ranks"),
        ("memory of a step", f"{found.memory / 2**20:.1f} MiB on the rank that needs most"),
        ("rasters a rank opens", f"at most {found.rasters}"),
        ("communicators a rank is in", f"at most {found.groups}"),
        (
            "messages, forward and back",
            f"at most {found.messages} to {found.peers} peers, {found.bytes} bytes",
        ),
        ("sums over ranks", f"at most {found.sums}, {found.summed} bytes: of gradients, and of norms"),
        ("open files", f"{found.open_files}; rank 0 {found.open_files_of_root}"),
        ("store", f"at most {found.store_operations} operations until the first step has ended"),
    )
    width = max(len(name) for name, _ in rows)
    lines = [f"{found.ranks} ranks rehearsed in {found.seconds:.1f} s", *(f"  {n:{width}}  {v}" for n, v in rows)]
    lines += [f"warning: {line}" for line in found.warnings]
    lines += [f"would fail: {line}" for line in found.fails] or ["nothing found that would fail"]
    return "\n".join(lines)
