"""Rates of layers on this device: small networks measured layer by layer, at some channels and pixels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from tiledseg.architecture.unet import UNet
from tiledseg.execution.precision import CAST_DTYPES, PARAMETER_DTYPES
from tiledseg.pipeline.layer_times import measure_layer_times
from tiledseg.planning.cost_model.layer_work import CONVOLUTIONS, LayerWork, graph_work
from tiledseg.planning.cost_model.profile import FLOPS_PER_MULTIPLY_ADD
from tiledseg.training.calibration.in_place import layer_times
from tiledseg.units.widths import ACTIVATION_BYTES

SMALLEST = 8  # px: of a network whose layers take hardly longer than their launch
QUICK = 100  # px: networks on smaller images are run more often
LEAST_SHARE = 0.1  # of a layer's time that is not its launch

Rows = dict[str, list[list[float]]]  # class -> points


class Case(NamedTuple):
    """A network, the side of its input in pixels, and its precision. `whole`: all its layers are points, else those
    that its norm and upsampling bring."""

    network: UNet
    side: int
    precision: str = "fp32"
    whole: bool = True


class Timed(NamedTuple):
    """What a layer did, and seconds forward and backward."""

    work: LayerWork
    forward: float
    backward: float

    def or_quicker(self, other: Timed) -> Timed:
        """The less of each pass."""
        return self._replace(forward=min(self.forward, other.forward), backward=min(self.backward, other.backward))


def usual_cases() -> list[Case]:
    """U-Nets of two levels, which have each layer at one size and at half of it."""
    return list(_usual())


def _usual() -> Iterator[Case]:
    for channels, largest in ((8, 768), (12, 640), (16, 640), (24, 400), (32, 320), (64, 160), (128, 80), (256, 40)):
        for side in (largest, largest // 3, largest // 8, largest // 20):
            yield Case(UNet(2, base_channels=channels, classes=5), max(SMALLEST, 2 * (side // 2)))
    for norm in ("pixel", "instance", "batch"):
        for channels, largest in ((8, 640), (16, 512), (32, 256)):
            for side in (largest, largest // 3, largest // 10):
                yield Case(
                    UNet(2, base_channels=channels, classes=5, norm=norm), max(SMALLEST, 2 * (side // 2)), whole=False
                )
    for channels, side in ((8, 512), (8, 96), (16, 256), (16, 64), (32, 128), (32, 32)):
        yield Case(UNet(2, base_channels=channels, classes=5, kernel=5), side, whole=False)
    for upsampling in ("nearest", "bilinear"):
        for side in (48, 192, 512):
            yield Case(UNet(2, base_channels=16, classes=5, upsampling=upsampling), side, whole=False)
    for precision in ("bf16", "fp16", "fp64"):
        for channels, largest in ((8, 320), (16, 192), (32, 96)):
            for side in (largest, largest // 4):
                yield Case(UNet(2, base_channels=channels, classes=5), side, precision)


def measure_case(case: Case, device: torch.device, repeats: int = 1) -> list[Timed]:
    """Each layer of a case that does something: in its place on a CPU, whose caches count; by itself on a GPU."""
    graph, bands, size = case.network.graph(), case.network.bands, (case.side, case.side)
    if device.type == "cpu":
        seconds = layer_times(case.network, case.side, case.precision, repeats if case.side > QUICK else 4 * repeats)
    else:
        cast = CAST_DTYPES.get(case.precision)
        dtype = PARAMETER_DTYPES[case.precision]
        seconds = list(measure_layer_times(graph, bands, size, device, dtype, cast, 3 * repeats))
    works = graph_work(graph, bands, size, ACTIVATION_BYTES[case.precision])
    plain = {work.kind for work in graph_work(UNet(2).graph(), 4, (8, 8), 4)}
    return [
        Timed(work, *times)
        for work, times in zip(works, seconds, strict=True)
        if work.pixels and (case.whole or work.kind not in plain)
    ]


def launch_seconds(timed: Iterable[Timed]) -> float:
    """What any kernel takes, however little it does: the quickest of tiny layers."""
    return min(one.forward for one in timed)


def points(timed: Iterable[Timed], launch: float) -> Rows:
    """Rates by class, those of like layers together, sorted."""
    sums: dict[tuple[str, float, int, int], list[float]] = {}
    for work, forward, backward in timed:
        held = sums.setdefault((work.kind, work.ratio, work.channels, work.pixels), [0.0] * 4)
        done = (float(work.forward_bytes), float(work.backward_bytes))
        if work.kind in CONVOLUTIONS:
            operations = float(FLOPS_PER_MULTIPLY_ADD * work.multiply_adds)
            done = operations, operations * work.passes
        spent = (max(each - launch, LEAST_SHARE * each) for each in (forward, backward))
        for index, value in enumerate((*done, *spent)):
            held[index] += value
    rows: Rows = {}
    for (kind, ratio, channels, pixels), (forward, backward, there, back) in sorted(sums.items()):
        rate = forward / there
        row = [ratio, channels, pixels, rate, backward / back if backward and back else rate]
        rows.setdefault(kind, []).append([float(f"{value:.4g}") for value in row])
    return rows
