"""Kernels at 2^31 values and more: does each one give what it gives on a small piece of the same tensor?

torch has crashed here, or been silently wrong (pytorch#185788, #80020, #117736, #95024). The cases run in a process of
their own, and go on in another one after a failure: a wrong address breaks the GPU's context for all that follows. In
the small form tensors have 2^15 values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks.gpu.lines import read_lines
from benchmarks.gpu.part import Part, begin_part
from benchmarks.gpu.production import finish
from benchmarks.launching import python, run_process
from tiledseg.errors import CommunicationError
from tiledseg.models.layers.convolution import SteadyConvolution
from tiledseg.models.layers.resampling import UpsampleModule

EDGE = 8  # pixels a side of the piece at the end of the tensor, which lies beyond 2^31 values
Build = Callable[[], nn.Module]
CHANNELS = 128

# Name: module, and factor of the input's side that makes the *larger* of input and output hold all the values.
CASES: dict[str, tuple[Build, int]] = {
    "bilinear of torch": (lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), 2),
    "bilinear of the project": (lambda: UpsampleModule(scale_factor=2, mode="bilinear", align_corners=False), 2),
    "nearest": (lambda: UpsampleModule(scale_factor=2, mode="nearest"), 2),
    "convolution 3 x 3": (lambda: SteadyConvolution(CHANNELS, 8, 3, padding=1), 1),
    "transposed convolution": (lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, stride=2), 2),
    "max pool": (lambda: nn.MaxPool2d(2), 1),
}
NAMES = [f"{case}, {layout}" for case in CASES for layout in ("channels_last", "contiguous")]


def main() -> int:
    part = begin_part(__file__)
    small = part.small or part.device.type == "cpu"
    if "--from" in sys.argv:
        return run_from(part, sys.argv[-1], small)
    while (names := open_cases(part)) and part.left > 10:
        fault = in_process(part, names[0], small)
        if fault is not None and (names := open_cases(part)):  # it died without a line of the case that it was at
            part.measure(names[0], "largest error", partial(_fail, fault))
    for name in open_cases(part):
        part.measure(name, "largest error", lambda: 0.0, needs=10)
    return int(any(line["state"] == "failed" for line in read_lines(part.folder) if line["part"] == part.name))


def open_cases(part: Part) -> list[str]:
    """Cases without a line so far, in order."""
    done = {line["name"] for line in read_lines(part.folder) if line["part"] == part.name}
    return [name for name in NAMES if name not in done]


def run_from(part: Part, first: str, small: bool) -> int:
    """The cases from `first` on; ends at one that fails: the context may be broken then."""
    for name in NAMES[NAMES.index(first) :]:
        part.measure(name, "largest error", partial(check, name, small, part.device))
        if part.failed:
            break
    return 0


def in_process(part: Part, first: str, small: bool) -> str | None:
    """Runs the cases from `first` on in a process of their own; why it ended before its time, or None."""
    words = ["--out", str(part.folder), "--work", str(part.work), "--seconds", str(part.left)]
    words += ["--small"] if small else []
    try:
        done = run_process(python("benchmarks.gpu.large_tensors", *words, "--from", first), part.left)
    except CommunicationError as error:
        return str(error)
    return f"ended with code {done.code}: {done.reason}" if done.code else None


def _fail(reason: str) -> None:
    raise RuntimeError(reason)


def check(name: str, small: bool, device: torch.device) -> float:
    """Forward, and backward of the sum, in bfloat16 on a GPU: the last pixels beside those of the piece alone.

    Returns the largest difference; AssertionError above bfloat16's rounding.
    """
    case, layout = name.split(", ")
    build, factor = CASES[case]
    torch.manual_seed(0)
    side = (16 if small else 4096) // factor  # 128 channels x 4096 x 4096 are 2^31 values
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    memory = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    module = build().to(device, dtype)
    x_BCHW = torch.empty(1, CHANNELS, side, side, device=device, dtype=dtype).normal_().contiguous(memory_format=memory)
    x_BCHW.requires_grad_()
    y_BCHW = module(x_BCHW)
    y_BCHW.backward(torch.ones_like(y_BCHW))
    finish(device)
    piece_BCHW = x_BCHW.detach()[:, :, -EDGE:, -EDGE:].clone().requires_grad_()
    end_BCHW = module(piece_BCHW)
    end_BCHW.backward(torch.ones_like(end_BCHW))
    assert x_BCHW.grad is not None
    assert piece_BCHW.grad is not None
    inner = 2  # what lies at the piece's own edge sees a border that is not the tensor's
    rows = end_BCHW.shape[2] - inner * max(1, end_BCHW.shape[2] // EDGE)
    pairs = [(y_BCHW[:, :, -rows:, -rows:], end_BCHW[:, :, -rows:, -rows:])]
    pairs.append((x_BCHW.grad[:, :, -EDGE + inner :, -EDGE + inner :], piece_BCHW.grad[:, :, inner:, inner:]))
    worst = max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)
    if not worst <= 0.02:
        raise AssertionError(f"the last pixels differ by {worst:.1e} from those of the piece alone")
    return worst


if __name__ == "__main__":
    sys.exit(main())
