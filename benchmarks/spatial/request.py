"""What our program and the peers' share: arguments, replacing layers, equality, and the one line of JSON."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.measurement import measure, short
from benchmarks.precision import DTYPES
from benchmarks.spatial.workload import WORKLOADS, Gradients, Workload, block_edges, undivided_gradients
from tiledseg.errors import ConfigError


@dataclass(frozen=True)
class Request:
    """A workload, the mesh (rows, cols) it is spread over, and how often it is timed."""

    workload: Workload
    mesh: tuple[int, int]
    repeat: int


def parse_request(description: str, ranks: int) -> Request:
    """The command line; exits 2 with one line where it cannot be run on `ranks` ranks."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="conv")
    parser.add_argument("--size", type=int, nargs=2, default=[256, 256], metavar=("H", "W"))
    parser.add_argument("--channels", type=int, default=8, help="of the single convolution")
    parser.add_argument("--mesh", type=int, nargs=2, default=[1, ranks], metavar=("R", "C"))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--base-channels", type=int, default=8)
    parser.add_argument("--upsampling", choices=("transposed", "nearest", "bilinear"), default="transposed")
    given = parser.parse_args()
    mesh = (given.mesh[0], given.mesh[1])
    try:
        if mesh[0] * mesh[1] != ranks:
            raise ConfigError(f"a mesh of {mesh[0]} x {mesh[1]} needs {mesh[0] * mesh[1]} ranks, not {ranks}")
        if given.repeat < 1:
            raise ConfigError(f"repeat is {given.repeat}; give at least 1")
        workload = Workload(
            given.workload,
            (given.size[0], given.size[1]),
            channels=given.channels,
            levels=given.levels,
            base_channels=given.base_channels,
            upsampling=given.upsampling,
            dtype=DTYPES[given.dtype],
        )
        for length, parts in zip(workload.size, mesh, strict=True):
            block_edges(length, parts, workload.alignment)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    return Request(workload, mesh, given.repeat)


def replace_layers(module: nn.Module, twin_of: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The network with every leaf module that has a twin replaced by it, in place."""
    for name, child in list(module.named_children()):
        if next(child.children(), None) is None:
            module.add_module(name, twin_of(child))
        else:
            replace_layers(child, twin_of)
    return module


def median_seconds(step: Callable[[], object], barrier: Callable[[], object], repeat: int) -> float:
    """Median wall time of `step` between two barriers, after one warm-up: the time of the slowest rank."""
    return statistics.median(measure(step, barrier, repeat).seconds)


def compare(workload: Workload, theirs: Gradients) -> dict[str, float]:
    """max |difference| / max |torch's| of y and dx; for dW the worst over all weights and biases."""
    ours = undivided_gradients(workload)
    if ours.dw.keys() != theirs.dw.keys():
        raise ValueError(f"weights differ in name: {sorted(ours.dw.keys() ^ theirs.dw.keys())}")
    return {
        "y": _relative(theirs.y_BCHW, ours.y_BCHW),
        "dx": _relative(theirs.dx_BCHW, ours.dx_BCHW),
        "dW": max(_relative(theirs.dw[name], tensor) for name, tensor in ours.dw.items()),
    }


def report(peer: str, request: Request, seconds: float, equal: Mapping[str, float], notes: str) -> None:
    workload = request.workload
    line = {
        "peer": peer,
        "workload": workload.name,
        "size": workload.size,
        "dtype": str(workload.dtype).removeprefix("torch."),
        "mesh": request.mesh,
        "seconds": round(seconds, 5),
        "equal": equal,
        "notes": notes,
    }
    print(json.dumps(line), flush=True)


def _relative(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    if theirs.shape != ours.shape:
        raise ValueError(f"shape {tuple(theirs.shape)} against torch's {tuple(ours.shape)}")
    return short(((theirs - ours).abs().max() / ours.abs().max()).item())
