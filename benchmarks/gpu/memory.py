"""Memory that the planner promises against what a step takes, and the largest image that one step takes whole."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.lines import one_line
from benchmarks.gpu.part import Part, SkippedError, begin_part
from benchmarks.gpu.production import ProductionStep, forget_peak, peak_bytes
from tiledseg.architecture.unet import UNet
from tiledseg.errors import TiledsegError
from tiledseg.execution.carrying import make_deterministic
from tiledseg.planning.walk.step_memory import training_memory
from tiledseg.units import ACTIVATION_BYTES

STEP_SIDE = 256  # the largest image is looked for in these steps, pixels


def main() -> int:
    part = begin_part(__file__)
    make_deterministic(True)
    small = part.small or part.device.type == "cpu"
    unet = UNet(3, base_channels=4) if small else UNet(5, base_channels=64)
    for precision in ("fp32", "bf16"):
        for side in (32, 48, 64) if small else (1024, 1536, 2048):
            name = f"step at {side} px, {precision}"
            part.measure(
                name, "measured over planned", partial(beside_plan, unet, side, precision, part.device), needs=2
            )
    for precision in ("bf16", "fp32"):
        part.measure(f"largest image, {precision}", "px", partial(largest, part, unet, precision), needs=8)
    return int(part.failed)


def planned(unet: UNet, side: int, precision: str) -> int:
    """Bytes of a step, by the planner."""
    return training_memory(unet.graph(), unet.bands, (side, side), ACTIVATION_BYTES[precision]).total


def beside_plan(unet: UNet, side: int, precision: str, device: torch.device) -> dict[str, Any]:
    """The peak of two production steps (the second one with the optimizer's state)."""
    measured = step_bytes(unet, side, precision, device)
    expected = planned(unet, side, precision)
    if measured is None:
        raise SkippedError("the steps ran, but only a GPU's allocator counts its bytes")
    return {"ratio": measured / expected, "planned_bytes": expected, "measured_bytes": measured}


def step_bytes(unet: UNet, side: int, precision: str, device: torch.device) -> int | None:
    forget_peak(device)
    step = ProductionStep(unet, side, precision, device)
    try:
        for _ in range(2):
            step.run()
    finally:
        step.close()
    return peak_bytes(device)


def largest(part: Part, unet: UNet, precision: str) -> dict[str, Any]:
    """The largest side that runs, in steps of STEP_SIDE, from the one that the planner believes in, up or down; and
    what the next larger one says. `sure`: False where time ran out before both were found."""
    part.needs_gpu()
    if part.small:
        raise SkippedError("a small network takes images that no small form has the time for")
    free = torch.cuda.mem_get_info(part.device)[0]
    believed = STEP_SIDE
    while planned(unet, believed + STEP_SIDE, precision) <= free:
        believed += STEP_SIDE
    faults: dict[int, str | None] = {}
    side = believed
    while part.left > 4 and side > 0:
        faults[side] = _fault(unet, side, precision, part.device)
        side += STEP_SIDE if faults[side] is None else -STEP_SIDE
        if side in faults:  # what runs and what does not stand side by side
            break
    runs = max((s for s, fault in faults.items() if fault is None), default=None)
    above = min((s for s, fault in faults.items() if fault is not None), default=None)
    reason = faults[above] if above is not None else None
    sure = runs is not None and above is not None
    return {"px": runs, "planned_px": believed, "free_bytes": free, "sure": sure, "above": reason}


def _fault(unet: UNet, side: int, precision: str, device: torch.device) -> str | None:
    """Why a step of this side does not run; None where it does."""
    try:
        step_bytes(unet, side, precision, device)
    except (RuntimeError, TiledsegError) as error:  # out of memory, or an index that is too large for a kernel
        return one_line(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
