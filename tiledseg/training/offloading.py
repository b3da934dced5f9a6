"""Memory of a run: activations in a store, the host's freed memory under a budget, and memory that runs out.

A CPU's tensors go to a file on a local disk, a GPU's to the memory of its host.
"""

from __future__ import annotations

import mmap
import os
import resource
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch

from tiledseg.comm.mesh import Mesh
from tiledseg.errors import ConfigError, InputError, MemoryLimitError, first_line
from tiledseg.execution.memory import host_memory
from tiledseg.memory.mover import HOST
from tiledseg.memory.saved import Hooks
from tiledseg.planning.run.memory import OffloadPlan
from tiledseg.planning.run.plan import RunPlan, plan_run
from tiledseg.planning.run.question import RunQuestion
from tiledseg.system.freed_memory import held_below, keep_no_more, own_bytes

if TYPE_CHECKING:
    from tiledseg.memory.offload import Offload


MIB = 2**20


class Moved(NamedTuple):
    """What has left for `store` and come back, bytes of all ranks together; the longest that a rank has waited
    for it; the most bytes that autograd alone held in a rank's memory; the share of tensors that were prefetched when
    they were used, None where none was; and passes forward and back."""

    store: str
    bytes_out: int
    bytes_in: int
    waited_seconds: float
    peak_bytes: int
    ahead: float | None
    steps: int

    @property
    def in_words(self) -> str:
        """For the user."""
        return (
            f"offload: {self.bytes_out / MIB:.1f} MiB went to {store_in_words(self.store)}, "
            f"{self.bytes_in / MIB:.1f} MiB came back, {self.waited_seconds:.1f} s were waited"
        )


def store_in_words(store: str) -> str:
    """Where what has left lies."""
    return "the host's memory" if store == HOST else f"a file in {store}"


def offload_to(store: str, plan: OffloadPlan | None, in_stages: bool, mesh: Mesh) -> Offload | None:
    """In its context what autograd keeps leaves for `store`, as planned; None where nothing does.
    Its end gives all back, however it comes about. `in_stages`: micro-batches go forward and back in turns, so that
    `end_step` tells the steps; else each forward pass after a backward pass begins one."""
    if plan is None:
        return None
    from tiledseg.memory.file_store import free_bytes
    from tiledseg.memory.offload import LEAST, Offload, mover_to

    limit = host_memory() // mesh.launch.local_size if store == HOST else free_bytes(store)  # ranks share their host's
    least = 1 if plan.chosen else LEAST
    return Offload(mover_to(store, mesh.device, limit), plan.staying, least, in_stages, all_kept=not plan.chosen)


def hooks_of(moving: Offload | None) -> Hooks | None:
    """What holds the tensors that a memory policy has leave."""
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


def moved_by_ranks(found: Offload | None, store: str, mesh: Mesh) -> Moved | None:
    """Collective: on all ranks the same. None where nothing was to leave."""
    if found is None:
        return None
    each = mesh.communicator.gather_objects(found.counted())
    out, back = sum(figures.bytes_out for figures in each), sum(figures.bytes_in for figures in each)
    waited = max(figures.waited_seconds for figures in each)
    ahead, wanted = sum(f.expected for f in each), sum(f.expected + f.demanded for f in each)
    share = ahead / wanted if wanted else None
    steps = sum(figures.steps for figures in each)
    return Moved(store, out, back, waited, max(figures.peak_bytes for figures in each), share, steps)


WORTH_SAYING = 0.1  # of the run's time
_TOUCHED = 1 << 28  # bytes


class Freed(AbstractContextManager[None]):
    """While a run trains. A rank holds at most `budget` bytes more than when this was made, where tensors are rebuilt;
    what its tensors hold alone, where blocks are taken: they are for memory that is shorter still."""

    def __init__(self, budget: int, in_blocks: bool) -> None:
        self._budget, self._in_blocks = budget, in_blocks
        self._most = own_bytes() + budget
        self._stack = ExitStack()
        if in_blocks:
            keep_no_more(os.environ)

    @classmethod
    def by(cls, question: RunQuestion, plan: RunPlan, device: torch.device) -> Freed | None:
        """None where all of it is kept: of a budget that nothing is rebuilt for, and no blocks are taken."""
        demanded = plan.rebuilt is not None or plan.blocks is not None
        if not (question.budgeted and demanded and device.type == "cpu"):
            return None
        return cls(question.memory, plan.blocks is not None)

    @property
    def in_words(self) -> str:
        """For the user."""
        what = "" if self._in_blocks else f", as far as {self._budget / 2**20:.1f} MiB have no room for it"
        return f"freed memory goes back to the system{what}"

    def __enter__(self) -> None:
        if not self._in_blocks:
            self._stack.enter_context(held_below(self._most, os.environ))
        self._pages, self._begun = pages_taken(), time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
        self._pages, self._seconds = pages_taken() - self._pages, time.perf_counter() - self._begun

    def what_it_took(self) -> str | None:
        """For the user, after the run: see `clearing_in_words`."""
        return clearing_in_words(self._pages, first_touch(), self._seconds)


def pages_taken() -> int:
    """Return the pages that this process has taken so far: each has been cleared."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def clearing_in_words(pages: int, seconds_a_byte: float, seconds: float) -> str | None:
    """For the user, of a run of so many seconds; None where it is little."""
    cleared = pages * os.sysconf("SC_PAGE_SIZE") * seconds_a_byte
    if cleared < WORTH_SAYING * seconds:
        return None
    return (
        f"about {cleared:.1f} of {seconds:.1f} s went into clearing memory that had been given back: a larger "
        "memory.budget gives less back, and one by which nothing is computed once more and no blocks are taken nothing"
    )


_LESS = 0.8, 0.6, 0.4  # of what was planned: the smallest budget may be too small for any choice


@contextmanager
def told_what_fits(question: RunQuestion, plan: RunPlan) -> Iterator[None]:
    """Memory that runs out within becomes a MemoryLimitError."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        from tiledseg.memory.exhausted import is_exhausted, what_was_asked

        if not is_exhausted(error):
            raise
        what = f"{what_was_asked(error)}; a step was planned to take {_planned(question, plan)} bytes"
        raise MemoryLimitError(f"{what}; use {_remedy(question, plan)} ({first_line(error)})") from error


def _planned(question: RunQuestion, plan: RunPlan) -> int:
    """Bytes of the rank that needs most."""
    if plan.rebuilt is not None or plan.pipeline is None:
        return plan.rebuilt.peak if plan.rebuilt else plan.memory
    from tiledseg.planning.run.pipeline import pipeline_bytes

    asked = question.parallel, question.graph, question.network.bands, plan.micro_batch
    return pipeline_bytes(*asked, plan.pipeline.balance)


def _remedy(question: RunQuestion, plan: RunPlan) -> str:
    """Return a smaller budget that the plan can meet with these settings, else settings that need less."""
    planned = _planned(question, plan)
    alike = replace(question, budgeted=True, parallel=replace(question.parallel, timed=False))
    for share in _LESS:
        budget = int(share * min(planned, question.memory))
        try:
            if plan_run(replace(alike, memory=budget)).memory <= budget or alike.parallel.stages > 1:
                return f"memory.budget {budget}"
        except InputError:
            continue
    return "a finer tiling.grid, memory.blocks auto with memory.store, more ranks, or a smaller model"


def first_touch() -> float:
    """Seconds a byte that the system takes to clear memory for this process: a page's first write, less its second."""
    seconds = []
    with mmap.mmap(-1, _TOUCHED) as block:
        for _ in range(2):
            begin = time.perf_counter()
            for page in range(0, _TOUCHED, mmap.PAGESIZE):
                block[page] = 1
            seconds.append(time.perf_counter() - begin)
    return max(0.0, seconds[0] - seconds[1]) / _TOUCHED
