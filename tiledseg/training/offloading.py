"""Memory of a run: activations in a store, the host's freed memory under a budget, and memory that runs out.

A CPU's tensors go to a file on a local disk, a GPU's to the memory of its host.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tiledseg.comm.mesh import Mesh
from tiledseg.errors import ConfigError, InputError, MemoryLimitError, first_line
from tiledseg.execution.memory import host_memory
from tiledseg.memory.mover import HOST
from tiledseg.memory.saved import Hooks
from tiledseg.planning.run.memory import OffloadPlan
from tiledseg.planning.run.plan import RunPlan, plan_run
from tiledseg.planning.run.question import RunQuestion

if TYPE_CHECKING:
    from tiledseg.memory.offload import Offload


MIB = 2**20


def in_words(moved: Mapping[str, Any]) -> str:
    """Return the line for the user on the offloading of a run, of `moved_by_ranks`."""
    out, back = (f"{moved[key] / MIB:.1f} MiB" for key in ("bytes_out", "bytes_in"))
    place, waited = store_in_words(moved["store"]), moved["waited_seconds"]
    return f"offload: {out} went to {place}, {back} came back, {waited:.1f} s were waited"


def store_in_words(store: str) -> str:
    """Return the words for a store."""
    return "the host's memory" if store == HOST else f"a file in {store}"


def offload_to(store: str, plan: OffloadPlan | None, mesh: Mesh) -> Offload | None:
    """Return a context in which autograd's tensors are offloaded to `store`, as planned; None if none are."""
    if plan is None:
        return None
    from tiledseg.memory.file_store import free_bytes
    from tiledseg.memory.offload import LEAST, Offload, mover_to

    limit = host_memory() // mesh.launch.local_size if store == HOST else free_bytes(store)  # ranks share their host's
    least = 1 if plan.chosen else LEAST
    return Offload(mover_to(store, mesh.device, limit), plan.staying, least, all_kept=not plan.chosen)


def hooks_of(moving: Offload | None) -> Hooks | None:
    """Return the hooks by which a memory policy offloads tensors."""
    return None if moving is None else Hooks(moving.pack, lambda back: back(), moving.passed)


def check_store(offload: str, store: str, device: torch.device) -> None:
    """Raise ConfigError where something is to leave a memory that has no way to its store."""
    if offload == "none":
        return
    if device.type == "cpu" and store == HOST:
        raise ConfigError(
            f"memory.offload is {offload}, but memory.store is host, the memory that is to be spared; give a folder on "
            "a local disk"
        )
    if device.type != "cpu" and store != HOST:
        raise ConfigError(
            f"memory.offload is {offload} and memory.store {store}, but this machine's tensors are on {device}, and "
            "leave for the host's memory; use memory.store host, or leave it out"
        )


def moved_by_ranks(offload: Offload | None, store: str, mesh: Mesh) -> dict[str, Any] | None:
    """Return the figures of all ranks as JSON has them; None if nothing was offloaded. Collective.

    `bytes_out`, `bytes_in`: to `store` and back. `waited_seconds`: of the rank that waited longest. `peak_bytes`: most
    that autograd alone held on a rank. `ahead`: share of tensors prefetched when they were used. `steps`:
    optimizer steps, summed over ranks.
    """
    if offload is None:
        return None
    each = mesh.communicator.gather_objects(offload.counted())
    ahead, fetched = sum(f.expected for f in each), sum(f.expected + f.demanded for f in each)
    return {
        "store": store,
        "bytes_out": sum(figures.bytes_out for figures in each),
        "bytes_in": sum(figures.bytes_in for figures in each),
        "waited_seconds": max(figures.waited_seconds for figures in each),
        "peak_bytes": max(figures.peak_bytes for figures in each),
        "ahead": ahead / fetched if fetched else None,
        "steps": sum(figures.steps for figures in each),
    }


def gives_back(question: RunQuestion, plan: RunPlan, device: torch.device) -> bool:
    """Return True for a run under `memory.budget` that needs it: a CPU's freed memory then goes back to the system."""
    return question.budgeted and device.type == "cpu" and (plan.rebuilt is not None or plan.blocks is not None)


@contextmanager
def told_what_fits(question: RunQuestion, plan: RunPlan) -> Iterator[None]:
    """Raise MemoryLimitError, with settings that fit, where memory runs out in the block."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        from tiledseg.memory.exhausted import is_exhausted, what_was_asked

        if not is_exhausted(error):
            raise
        planned = plan.rebuilt.peak if plan.rebuilt else 0 if plan.pipeline else plan.memory
        what = f"{what_was_asked(error)}; " + (f"a step was planned to take {planned} bytes; " if planned else "")
        remedy = _remedy(question, planned or plan.memory)
        raise MemoryLimitError(f"{what}use {remedy} ({first_line(error)})") from error


def _remedy(question: RunQuestion, planned: int) -> str:
    """Return a smaller budget that the plan can meet with these settings, else settings that need less."""
    for share in (0.8, 0.6, 0.4):
        budget = int(share * min(planned, question.memory))
        try:
            plan_run(replace(question, budgeted=True, memory=budget))
            return f"memory.budget {budget}"
        except InputError:
            continue
    return "a finer tiling.grid, memory.blocks auto with memory.store, more ranks, or a smaller model"


_TOUCHED = 1 << 28  # bytes


def first_touch() -> float:
    """Measure the seconds a byte in which the system clears memory: a page's first write, less its second."""
    seconds = []
    with mmap.mmap(-1, _TOUCHED) as block:
        for _ in range(2):
            begin = time.perf_counter()
            for page in range(0, _TOUCHED, mmap.PAGESIZE):
                block[page] = 1
            seconds.append(time.perf_counter() - begin)
    return max(0.0, seconds[0] - seconds[1]) / _TOUCHED
