"""What a step costs in each way, beside the step as it is: rounds in which every way has its turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from torch.autograd.graph import save_on_cpu

import tiledseg
from benchmarks.large_model_support.network import make_step
from tiledseg.memory.mover import Figures
from tiledseg.memory.offload import Offload

Way = Callable[[], AbstractContextManager[object]]

SHARES = (0.75, 0.5, 0.33, 0.25)
"""Of what autograd keeps, the part that stays in memory."""


class Seconds(NamedTuple):
    """Of a step, by the clock, and of all processors together."""

    passed: float
    worked: float


@dataclass
class Row:
    """`ratio`: seconds over those of the step as it is, median over rounds of pairs; `work`: the same of processor
    time, which other programs disturb less; `moved`: bytes out and in, a step (None: not known)."""

    name: str
    ratio: float
    work: float
    seconds: float
    moved: float | None = None

    def line(self) -> str:
        moved = "" if self.moved is None else f"{self.moved / 1e6:.0f}"
        rate = "" if self.moved is None else f"{self.moved / self.seconds / 1e6:.0f}"
        return (
            f"| {self.name} | {self.seconds:.2f} | {100 * (self.ratio - 1):+.1f} % | "
            f"{100 * (self.work - 1):+.1f} % | {moved} | {rate} |"
        )


COLUMNS = ("way", "s a step", "more time", "more processor time", "MB moved a step", "MB/s")
HEADING = f"| {' | '.join(COLUMNS)} |\n{'| --- ' * len(COLUMNS)}|"


def ours(store: Path, budget: int) -> Offload:
    return tiledseg.large_model_support(budget=budget, store=store, store_limit="1TiB")


def kept_bytes(step: Callable[[], float], store: Path) -> int:
    """What autograd alone holds at most in the step."""
    whole = ours(store, 1 << 60)
    with whole:
        step()
    return whole.figures.peak_bytes


def overhead(levels: int, channels: int, size: int, store: Path, rounds: int) -> tuple[int, list[Row]]:
    """Bytes that are kept, and a row for each way. Raises AssertionError where a way changes a loss.

    On a CPU `save_on_cpu` frees nothing: it copies from memory to memory. It stands here for its cost alone.
    """
    step = make_step(levels, channels, size, 1)
    again = make_step(levels, channels, size, 1, recompute=True)
    kept = kept_bytes(step, store)
    supports = {f"ours, {share:.0%} kept": ours(store, int(share * kept)) for share in SHARES}
    supports["ours with model, 50% kept"] = tiledseg.large_model_support(step.network, budget=kept // 2)
    ways: dict[str, tuple[Callable[[], float], Way]] = {
        "nothing": (step, nullcontext),
        "save_on_cpu (frees nothing on a CPU)": (step, save_on_cpu),
        "every block computed twice": (again, nullcontext),
    }
    ways |= {name: (step, _same(support)) for name, support in supports.items()}
    times: dict[str, list[Seconds]] = {name: [] for name in ways}
    for support in supports.values():  # recorded, then followed
        with support:
            assert step() == step() == step()
        vars(support.figures).update(vars(Figures()))
    for _ in range(rounds):
        losses = {_timed(*way, times[name]) for name, way in ways.items()}
        assert len(losses) == 1, f"losses differ: {losses}"
    return kept, [_row(name, times, supports.get(name)) for name in ways]


def _same(support: Offload) -> Way:
    return lambda: support


def _timed(step: Callable[[], float], way: Way, times: list[Seconds]) -> float:
    """The second of two steps: what is made once for a loop is made in the first."""
    with way():
        step()
        begun, worked = time.perf_counter(), time.process_time()
        loss = step()
        times.append(Seconds(time.perf_counter() - begun, time.process_time() - worked))
    return loss


def _row(name: str, times: dict[str, list[Seconds]], support: Offload | None) -> Row:
    plain = times["nothing"]
    pairs = list(zip(times[name], plain, strict=True))
    ratio, work = median(a.passed / b.passed for a, b in pairs), median(a.worked / b.worked for a, b in pairs)
    row = Row(name, ratio, work, median(each.passed for each in times[name]))
    if support is not None:
        figures, steps = support.figures, 2 * len(plain)
        row.moved = (figures.bytes_out + figures.bytes_in) / steps
    return row
