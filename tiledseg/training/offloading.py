"""Offloading of a run's activations, and settings that fit when memory runs out.

A CPU's tensors go to a file on a local disk, a GPU's to the memory of its host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tiledseg.comm.mesh import Mesh
from tiledseg.errors import ConfigError, InputError, MemoryLimitError, first_line
from tiledseg.execution.memory import free_memory
from tiledseg.geometry.tiling import finest_grid
from tiledseg.memory.device import CPU
from tiledseg.memory.mover import HOST
from tiledseg.memory.saved import Hooks
from tiledseg.planning.run.memory import OffloadPlan
from tiledseg.planning.run.plan import RunPlan, plan_run
from tiledseg.planning.run.question import RunQuestion

if TYPE_CHECKING:
    from tiledseg.memory.offload import Offload


def store_in_words(store: str) -> str:
    """Return a store's name for the user."""
    return "the host's memory" if store == HOST else f"a file in {store}"


def offload_to(store: str, plan: OffloadPlan | None, mesh: Mesh) -> Offload | None:
    """Return a context that offloads autograd's tensors to `store` as planned; None without a plan."""
    if plan is None:
        return None
    from tiledseg.memory.file_store import free_bytes
    from tiledseg.memory.offload import LEAST, Offload, mover_to

    limit = free_memory(mesh, CPU) if store == HOST else free_bytes(store)
    least = 1 if plan.chosen else LEAST
    return Offload(mover_to(store, mesh.device, limit), plan.staying, least, all_kept=not plan.chosen)


def hooks_of(moving: Offload | None) -> Hooks | None:
    """Return the pack and unpack hooks of offloading, for the memory policy; None without offloading."""
    return None if moving is None else Hooks(moving.pack, lambda back: back(), moving.passed)


def check_store(offload: str, store: str, device: torch.device) -> None:
    """Raise ConfigError if tensors of `device` cannot be offloaded to the store."""
    if offload != "none" and (device.type == "cpu") == (store == HOST):
        other = "host" if store != HOST else "a folder on a local disk"
        raise ConfigError(
            f"memory.offload is {offload} and memory.store {store}, but tensors on {device} cannot go there; "
            f"give {other}"
        )


def moved_by_ranks(offload: Offload | None, store: str, mesh: Mesh) -> dict[str, Any] | None:
    """Return the offloading figures of all ranks for `summary.json`; None if nothing was offloaded. Collective.

    `bytes_out`, `bytes_in`: to `store` and back, summed over ranks. `peak_bytes`: largest peak of autograd's tensors on
    a rank.
    """
    if offload is None:
        return None
    each = mesh.communicator.gather_objects(offload.figures)
    return {
        "store": store,
        "bytes_out": sum(figures.bytes_out for figures in each),
        "bytes_in": sum(figures.bytes_in for figures in each),
        "peak_bytes": max(figures.peak_bytes for figures in each),
    }


@contextmanager
def suggesting_settings(question: RunQuestion, plan: RunPlan) -> Iterator[None]:
    """Raise MemoryLimitError with settings that fit if memory runs out in the block."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        from tiledseg.memory.allocations import is_exhausted

        if not is_exhausted(error):
            raise
        limit = int(0.8 * min(plan.memory, question.memory))
        raise MemoryLimitError(
            f"memory has run out; a step was planned to take {plan.memory} bytes; "
            f"{remedy(question, plan, limit, (1.0, 0.75, 0.5))} ({first_line(error)})"
        ) from error


def remedy(question: RunQuestion, plan: RunPlan, limit: int, shares: Sequence[float] = (1.0,)) -> str:
    """Return advice by which a step needs at most `limit` bytes: the first budget of `shares` of it that can be kept,
    or the first grid that fits of those two, four, ... times as fine."""
    budgets = [int(share * limit) for share in shares]
    advice: list[tuple[str, dict[str, Any]]] = [
        (f"memory.budget {budget}", {"budgeted": True, "memory": budget}) for budget in budgets
    ]
    largest = max(plan.tilings, key=lambda tiling: math.prod(tiling.raster))
    grid, finest = largest.grid, finest_grid(largest.raster, plan.footprint)
    while not question.windows and grid != finest:
        grid = min(2 * grid[0], finest[0]), min(2 * grid[1], finest[1])
        advice.append((f"tiling.grid [{grid[0]},{grid[1]}]", {"grid": grid}))
    for setting, changes in advice:
        with suppress(InputError):
            if plan_run(replace(question, **changes)).memory <= limit:
                return f"use {setting}"
    return "no budget and no tiling.grid does; use parallel.halo layer on more ranks, or a smaller model"
