"""What every program of this benchmark shares: flags, equality before time, and the one line of JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.measurement import short
from benchmarks.pipeline.workload import Gradients, Workload, add_flags, reference, workload_of
from tiledseg.errors import ConfigError


@dataclass(frozen=True)
class Request:
    """A workload, how often it is timed, and what its gradients are held against."""

    workload: Workload
    repeat: int
    warm_up: int
    against: str
    reference: Path | None


@dataclass
class Carried:
    """Payload bytes and messages of a step, by route (such as "0 > 2", from stage to stage)."""

    bytes: dict[str, int] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)

    def count(self, route: str, tensor: torch.Tensor) -> None:
        self.bytes[route] = self.bytes.get(route, 0) + tensor.numel() * tensor.element_size()
        self.messages[route] = self.messages.get(route, 0) + 1

    def clear(self) -> None:
        self.bytes.clear()
        self.messages.clear()

    def to_dict(self) -> dict[str, Any]:
        """Sums, and the bytes of each route."""
        sums = {"bytes_sent": sum(self.bytes.values()), "messages": sum(self.messages.values())}
        return {**sums, "bytes_by_route": dict(sorted(self.bytes.items()))}

    @staticmethod
    def together(parts: list[Carried]) -> Carried:
        """That of all ranks; no two of them count the same route."""
        whole = Carried()
        for part in parts:
            whole.bytes |= part.bytes
            whole.messages |= part.messages
        return whole


def parser_of(description: str) -> argparse.ArgumentParser:
    """The flags that every program takes; a program adds its own."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    add_flags(parser)
    parser.add_argument("--repeat", type=int, default=5, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before them")
    parser.add_argument(
        "--against", choices=("float64", "float32"), default="float64", help="precision of the serial run"
    )
    parser.add_argument("--reference", type=Path, help="file that keeps the serial run's gradients between programs")
    return parser


def request_of(given: argparse.Namespace) -> Request:
    """Raises ConfigError where the flags do not fit together."""
    for name in ("repeat", "warm_up"):
        if getattr(given, name) < 0:
            raise ConfigError(f"{name} is {getattr(given, name)}; give at least 0")
    return Request(workload_of(given), given.repeat, given.warm_up, given.against, given.reference)


def serial_gradients(request: Request) -> Gradients:
    """Those of the serial run, computed once for each file. Raises ConfigError for a file of another workload."""
    workload, path = request.workload, request.reference
    if path is None or not path.exists():
        found = reference(workload, request.against)
        if path is not None:
            said = {"of": _key(request), "loss": repr(found.loss)}
            save_file({name: tensor.contiguous() for name, tensor in found.by_name.items()}, path, metadata=said)
        return found
    with safe_open(path, framework="pt") as file:
        if file.metadata()["of"] != _key(request):
            raise ConfigError(f"{path} holds the gradients of another workload; give --reference another file")
        return Gradients(float(file.metadata()["loss"]), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def compare(found: Gradients, serial: Gradients) -> dict[str, float]:
    """Relative differences: of the whole gradient in the Euclidean norm, of the worst weight in the largest element,
    and of the loss. Raises ValueError where weights have no gradient, or another shape."""
    if found.by_name.keys() != serial.by_name.keys():
        raise ValueError(f"gradients differ in name: {sorted(found.by_name.keys() ^ serial.by_name.keys())}")
    squares = difference = worst = 0.0
    for name, exact in serial.by_name.items():
        own = found.by_name[name]
        if own.shape != exact.shape:
            raise ValueError(f"the gradient of {name} has shape {tuple(own.shape)}, not {tuple(exact.shape)}")
        error, exact = own.double() - exact.double(), exact.double()
        squares += exact.square().sum().item()
        difference += error.square().sum().item()
        worst = max(worst, (error.abs().max() / exact.abs().max()).item())
    return {
        "gradients_differ_by": short((difference / squares) ** 0.5),
        "worst_weight_differs_by": short(worst),
        "loss_differs_by": short(abs(found.loss - serial.loss) / abs(serial.loss)),
    }


def report(who: str, schedule: str, request: Request, figures: Mapping[str, Any]) -> None:
    """Prints the one line."""
    workload = request.workload
    line = {
        "who": who,
        "schedule": schedule,
        "stages": workload.stages,
        "micro_batches": workload.micro_batches,
        "balance": workload.balance,
        "network": {"levels": workload.levels, "base_channels": workload.base_channels, "size": workload.size},
        "dtype": workload.dtype,
        "layout": workload.layout,
        **figures,
        "torch": torch.__version__,
    }
    print(json.dumps(line), flush=True)


def _key(request: Request) -> str:
    """What the serial gradients depend on."""
    workload = request.workload
    network = (workload.levels, workload.base_channels, workload.bands, workload.classes)
    return json.dumps([request.against, workload.layout, workload.size, workload.micro_batches, *network])
