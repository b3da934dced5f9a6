"""Which share of a map's time would the convolutions alone take?

    python -m benchmarks.whole_scene.convolution_share [--side 4096] [--grid 8] [--threads 2] [--apart]

A scene is mapped in this process as `tiledseg predict` maps it, from the first tile that is read to the file's last
byte; start-up and plan are not counted. Its convolutions, transposed ones too, are then run alone: the same modules on
inputs of the same shapes and layout, in the same order and by as many threads. Their time over the map's is the share.
The two take turns. `--apart`: activations by themselves, as they ran before convolutions applied them
(`models/layers/activated.py`). What the rest goes to is shown by torch's profiler, which looks at one more map
(`--profile`).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.spread import Spread, ratios
from benchmarks.whole_scene.sliding_window import prepare
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.session import leave, run_on_mesh
from tiledseg.inference import predictor
from tiledseg.inference.mapper import Mapper, checkpoint_mapper
from tiledseg.inference.request import Request
from tiledseg.models.layers.activated import Activated
from tiledseg.models.layers.convolution import SteadyConvolution
from tiledseg.system.freed_memory import keep_freed_memory

Call = tuple[nn.Module, torch.Size]
MEMORY = 16 << 30  # bytes that the plan may take


class Map:
    """One scene, mapped again and again."""

    def __init__(self, root: Path, grid: int, mesh: Mesh) -> None:
        self._mapper: Mapper = checkpoint_mapper(find_checkpoint(root / "run"))
        scene, made = str(root / "scene.tif"), str(root / "map.tif")
        self._request = Request(scene, made, grid=(grid, grid), verbosity=0)
        self._mesh = mesh

    def make(self) -> float:
        """Seconds."""
        taken: list[float] = []
        with _timed(taken):
            predictor.predict(self._request, self._mapper, MEMORY, self._mesh)
        return sum(taken)

    def calls(self) -> list[Call]:
        """The convolutions of a map, in order."""
        found: list[Call] = []
        with _recorded(found):
            self.make()
        return found


@contextmanager
def _timed(taken: list[float]) -> Iterator[None]:
    plain = predictor._map_tiles

    def timed(*given: object) -> None:
        begun = time.perf_counter()
        plain(*given)  # type: ignore[arg-type]
        taken.append(time.perf_counter() - begun)

    predictor._map_tiles = timed  # type: ignore[assignment]
    try:
        yield
    finally:
        predictor._map_tiles = plain


@contextmanager
def _recorded(found: list[Call]) -> Iterator[None]:
    plain = Activated.__call__

    def recorded(self: Activated, k: int, inputs: list[torch.Tensor]) -> torch.Tensor:
        if isinstance(self._modules[k], nn.Conv2d | nn.ConvTranspose2d):
            found.append((self._modules[k], inputs[0].shape))
        return plain(self, k, inputs)

    Activated.__call__ = recorded  # type: ignore[method-assign]
    try:
        yield
    finally:
        Activated.__call__ = plain  # type: ignore[method-assign]


def alone(calls: Sequence[Call]) -> float:
    """Seconds of the convolutions, each on an input that another one does not share."""
    shapes = {shape for _, shape in calls}
    inputs = {shape: torch.randn(shape).contiguous(memory_format=torch.channels_last) for shape in shapes}
    with torch.inference_mode():
        for module, shape in dict.fromkeys(calls):
            module(inputs[shape])
        begun = time.perf_counter()
        for module, shape in calls:
            module(inputs[shape])
        return time.perf_counter() - begun


def measure(root: Path, options: argparse.Namespace, mesh: Mesh) -> dict[str, object]:
    if options.apart:
        SteadyConvolution.activates = lambda self, x_BCHW: False  # type: ignore[method-assign]
    mapped = Map(root, options.grid, mesh)
    calls = mapped.calls()
    mapped.make()
    maps, convolutions = [], []
    for _ in range(options.repeats):
        maps.append(mapped.make())
        convolutions.append(alone(calls))
    if options.profile:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            mapped.make()
        print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=16, max_name_column_width=40))
    return {
        "map_seconds": Spread.of(maps).to_dict(),
        "convolution_seconds": Spread.of(convolutions).to_dict(),
        "share": ratios(convolutions, maps).to_dict(),
        "convolutions": len(calls),
    }


def main() -> int:
    options = _parser().parse_args()
    keep_freed_memory(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        prepare(root, options)
        found: list[dict[str, object]] = []

        def body(mesh: Mesh) -> None:
            torch.set_num_threads(options.threads)
            found.append(measure(root, options, mesh))

        code = run_on_mesh(body)
    line = {**vars(options), **found[0], "load": os.getloadavg()[0]}
    print(json.dumps(line))
    if options.json:
        Path(options.json).write_text(json.dumps(line) + "\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--side", type=int, default=4096, help="pixels a side of the scene")
    parser.add_argument("--grid", type=int, default=8, help="tiles a side")
    parser.add_argument("--levels", type=int, default=4)
    parser.add_argument("--base-channels", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--apart", action="store_true", help="convolutions and activations one after the other")
    parser.add_argument("--profile", action="store_true", help="show what one more map spends its time on")
    parser.add_argument("--json", help="file for the figures")
    return parser


if __name__ == "__main__":
    leave(main())
