"""Measured times of every layer of the paper's networks, and a file that keeps them."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.pipeline.paper_network import BANDS, network_graph
from tiledseg.architecture.presets import PRESETS
from tiledseg.models.network import build_network
from tiledseg.pipeline.layer_times import LayerTime, measure_layer_times

CPU_NAMES = Path("/proc/cpuinfo")


@dataclass(frozen=True, order=True)
class Case:
    """A network, and the pixels of a side of its square micro-batches."""

    network: str
    model: str
    size: int

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.network}/{self.model}/{self.size}"


@dataclass(frozen=True)
class Measurement:
    """Seconds of each layer, forward and backward, of each case; and what they were measured on."""

    machine: str
    base_channels: int
    repeats: int
    cases: dict[Case, tuple[LayerTime, ...]]

    def save(self, path: Path) -> None:
        """As JSON; seconds to four digits."""
        about = {"machine": self.machine, "base_channels": self.base_channels, "repeats": self.repeats}
        seconds = {
            case.key: [[float(f"{t.forward:.4g}"), float(f"{t.backward:.4g}")] for t in times]
            for case, times in sorted(self.cases.items())
        }
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(pairs)}" for key, pairs in seconds.items())
        path.write_text(f'{{"about": {json.dumps(about)},\n "seconds": {{\n{lines}\n}}}}\n')

    @staticmethod
    def load(path: Path) -> Measurement:
        """What `save` has written."""
        found = json.loads(path.read_text())
        cases = {}
        for key, pairs in found["seconds"].items():
            network, model, size = key.split("/")
            cases[Case(network, model, int(size))] = tuple(LayerTime(*pair) for pair in pairs)
        return Measurement(**found["about"], cases=cases)


def legal_size(model: str, size: int) -> int:
    """The least size of so many pixels or more that the poolings divide."""
    unit = 1 << (PRESETS[model].levels - 1)
    return -(-size // unit) * unit


def measure(cases: Sequence[Case], base_channels: int, repeats: int, device: torch.device) -> Measurement:
    """Layer by layer on the device, in float32; says how far it is."""
    found: dict[Case, tuple[LayerTime, ...]] = {}
    for case in cases:
        begun = time.perf_counter()
        graph = network_graph(case.network, case.model, base_channels)
        found[case] = measure_layer_times(graph, BANDS, (case.size, case.size), device, torch.float32, repeats=repeats)
        step = sum(t.forward + t.backward for t in found[case])
        print(f"{case.key}: {step:.3f} s a micro-batch, measured in {time.perf_counter() - begun:.0f} s", flush=True)
    return Measurement(_machine(device), base_channels, repeats, found)


def sums_and_wholes(cases: Sequence[Case], base_channels: int, repeats: int) -> list[tuple[str, float, float]]:
    """Of each case: its name, the sum of its layers' times, and the whole network's own, least of as many steps."""
    found = []
    for case in cases:
        graph = network_graph(case.network, case.model, base_channels)
        network = build_network(graph, BANDS).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        size = case.size, case.size
        times = measure_layer_times(graph, BANDS, size, torch.device("cpu"), torch.float32, repeats=repeats)
        x_BCHW = torch.randn(1, BANDS, *size).contiguous(memory_format=torch.channels_last)
        whole = []
        for _ in range(1 + repeats):
            begun = time.perf_counter()
            y_BKHW = network(x_BCHW)
            y_BKHW.backward(torch.ones_like(y_BKHW))
            whole.append(time.perf_counter() - begun)
        found.append((case.key, sum(t.forward + t.backward for t in times), min(whole[1:])))
    return found


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        lines = CPU_NAMES.read_text().splitlines() if CPU_NAMES.exists() else []
        named = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        name = f"CPU {named[0] if named else platform.processor()}, threads: {torch.get_num_threads()}"
    return f"{name}, torch {torch.__version__}"
