"""Planned peaks of training steps beside what the process holds in memory, as the system counts it.

    python -m benchmarks.planned_memory.resident            # freed memory goes back, as in runs under a budget
    python -m benchmarks.planned_memory.resident --kept     # it is kept, as in all others (`system.freed_memory`)

U-Nets of 3 and 4 levels, three norms, two upsamplings, with all kept and at budgets between, each in a process of its
own: it takes a step on a small context, by which libraries and threads are there, notes what it holds, and takes two
steps on the large one. What these add is set beside the plan. A line for each setting that is off by more than 8 %;
then how many are not, the median and the worst.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.planned_memory.peaks import budget_at, in_channels_last, module_by, step, walk_of
from tiledseg.architecture.unet import UNet
from tiledseg.planning.walk.choice import StepChoices
from tiledseg.system.freed_memory import keep_freed_memory, keep_no_more

SMALL = 64, 64
SHARES = 0.3, 0.6, 1.0
OFF = 0.08  # 5.9 % with an instance norm: the greedy choice rebuilds in other pieces
LIMIT = 300
"""Seconds a process may take."""


@dataclass(frozen=True)
class Case:
    """A U-Net, the share of the way from the least budget to all kept, the side of its context in pixels."""

    levels: int
    channels: int
    norm: str
    upsampling: str
    share: float
    side: int

    @property
    def network(self) -> UNet:
        return UNet(self.levels, base_channels=self.channels, norm=self.norm, upsampling=self.upsampling)


def taken(case: Case) -> dict[str, int]:
    """Bytes planned, and bytes that this process holds more at its peak than before."""
    context = case.side, case.side
    walk = walk_of(case.network, context=context)
    chosen = StepChoices(walk).choose(budget_at(walk, case.share))
    assert chosen is not None, f"nothing fits in {case}"
    module = in_channels_last(module_by(case.network, chosen.policy))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step(module, _input(case.network.bands, SMALL))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is there now
    before = status("VmRSS")
    for _ in range(2):
        step(module, _input(case.network.bands, context))
    return {"planned": chosen.peak, "resident": status("VmHWM") - before}


def _input(bands: int, context: tuple[int, int]) -> torch.Tensor:
    return torch.empty(1, bands, *context, memory_format=torch.channels_last).normal_()


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def cases(levels: Sequence[int], norms: Sequence[str], side: int) -> list[Case]:
    return [
        Case(count, 8, norm, upsampling, share, side)
        for count in levels
        for norm in norms
        for upsampling in ("transposed", "bilinear")
        for share in SHARES
    ]


def in_its_own_process(case: Case, words: Sequence[str]) -> dict[str, int]:
    command = [sys.executable, "-m", "benchmarks.planned_memory.resident", "--case", json.dumps(vars(case)), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    return json.loads(done.stdout)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--norms", nargs="+", default=["none", "instance", "batch"])
    parser.add_argument("--side", type=int, default=1536, help="of the context, pixels (default 1536)")
    parser.add_argument("--kept", action="store_true", help="freed memory is kept")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.case:
        (keep_freed_memory if options.kept else keep_no_more)(os.environ)
        print(json.dumps(taken(Case(**json.loads(options.case)))))
        return
    errors = []
    for case in cases(options.levels, options.norms, options.side):
        found = in_its_own_process(case, ["--kept"] if options.kept else [])
        errors.append(found["planned"] / found["resident"] - 1)
        if abs(errors[-1]) > OFF:
            print(f"{case}: {found['planned']} planned, {found['resident']} resident, {errors[-1]:+.1%}", flush=True)
    within = sum(abs(error) <= OFF for error in errors)
    worst = max(errors, key=abs)
    median = statistics.median(map(abs, errors))
    print(f"{within} of {len(errors)} within {100 * OFF:.0f} %, half within {median:.1%}, worst {worst:+.1%}")


if __name__ == "__main__":
    main()
