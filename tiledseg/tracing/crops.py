"""A module that is not traced, as a network of one node: mapped by crops of one size, or on whole images (decision
0020).

The bits of a crop's scores must not depend on its tile, its rank, or the crops beside it. On a CPU each crop is
computed alone, by kernels of one thread, and threads take a crop each. On a GPU crops run in batches of one size, where
a measurement shows that neither place nor neighbours in a batch change a bit, else alone.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from queue import SimpleQueue

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tiledseg.comm.doing import tick
from tiledseg.errors import ConfigError, first_line
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.crops import Crop, CropGrid, Crops
from tiledseg.memory.exhausted import is_exhausted
from tiledseg.models.dropout import ChannelDropout
from tiledseg.models.layers.block import BlockModule, BlockPlace, DimPlace, whole_place
from tiledseg.models.network import GraphNetwork
from tiledseg.raster.mirrored_reader import mirrored_positions, prefetch
from tiledseg.tracing.record import generators
from tiledseg.tracing.state import in_mode, kept_state

AT_ONCE = {"cpu": 1}
"""Most crops of a batch by the kind of device; 16 on others."""
_PIXELS = 2**20  # of a batch of crops
_TINY = 1e-300


def whole_network(module: nn.Module, bands: int, classes: int) -> GraphNetwork:
    """Return the network that runs a module, untraced, on whole images on one rank."""
    return _network(module, bands, Crops(None, classes, _count(module)))


def crops_network(
    module: nn.Module, bands: int, grid: CropGrid, classes: int | None = None, trains: bool = False
) -> GraphNetwork:
    """Return the network that runs a module, untraced, on crops, with the module's weights under their names.

    `classes`: how many it must give (None: 2 to 255). `trains`: it is trained on windows of a crop's size. Raises
    ConfigError where it does not run on a crop, gives other sizes, draws random numbers, or changes a buffer.
    """
    name, side = type(module).__name__, grid.window
    norms = [path for path, each in module.named_modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    if trains and norms:
        what = f"'{norms[0]}' of {name} takes statistics over windows, which the number of ranks would change"
        raise ConfigError(f"{what}; use another norm, or train without model.window")
    weight = next((p for p in module.parameters() if p.is_floating_point()), torch.zeros(()))
    draw = torch.Generator().manual_seed(0)
    crops = [torch.randn(1, bands, side, side, generator=draw) for _ in range(2)]
    with in_mode(module, False), kept_state(module) as changes, torch.no_grad():
        before = generators()
        one, _ = (scores_of(module, crop_BCHW.to(weight.device, weight.dtype)) for crop_BCHW in crops)
        with kept_state(module) as later:
            again = scores_of(module, crops[0].to(weight.device, weight.dtype, copy=True))
        if generators() != before or not torch.equal(one, again):
            raise ConfigError(
                f"{name} gives other scores when it is run again; let it draw and keep nothing in evaluation"
            )
    if changes.buffers:
        raise ConfigError(
            f"{name} changes its buffer '{next(iter(changes.buffers))}' in evaluation; leave it to training"
        )
    if later.attributes:
        what = f"{name} changes its attribute '{later.attributes[0]}' at every call in evaluation"
        raise ConfigError(f"{what}, which may change its scores; leave it to training")
    channels = one.shape[1]
    if channels != (classes or channels) or not 2 <= channels <= 255:
        raise ConfigError(f"{name} gives {channels} channels for {classes or '2 to 255'} classes; give each class one")
    return _network(module, bands, Crops(grid, channels, _count(module)))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _network(module: nn.Module, bands: int, layer: Crops) -> GraphNetwork:
    return GraphNetwork(Graph((Node("crops", layer),)), bands, [CropModule(layer, module)], module)


def scores_of(module: nn.Module, x_BCHW: torch.Tensor) -> torch.Tensor:
    """Return the first tensor that a module returns. Raise ConfigError where it does not run on such an input, or the
    tensor has no score for each pixel."""
    name, (_, bands, height, width) = type(module).__name__, x_BCHW.shape
    try:
        returned = module(x_BCHW)
    except Exception as error:  # whatever the module raises
        if is_exhausted(error):
            raise
        what = f"{name} does not run on {bands} bands of {height} x {width} pixels: {type(error).__name__}"
        raise ConfigError(f"{what}: {first_line(error)}; give the window and bands that it is made for") from error
    leaves = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
    shape = tuple(leaves[0].shape) if leaves else ()
    if len(shape) != 4 or (shape[0], *shape[2:]) != (len(x_BCHW), height, width):
        what = f"{name} gives {f'a tensor of {shape}' if leaves else 'no tensor'} for an input of {tuple(x_BCHW.shape)}"
        raise ConfigError(f"{what}; return ({len(x_BCHW)}, classes, {height}, {width})")
    return leaves[0]


class CropModule(BlockModule):
    """The module of `Crops`. Several threads run copies of it, with the same weights: its author may hand tensors on by
    attributes."""

    rows: Crops

    def __init__(self, layer: Crops, module: nn.Module) -> None:
        super().__init__(layer)
        self.module = module
        self.draws = ChannelDropout("crops", 0.0)  # its keys seed what the module draws in training
        self._batch: int | None = None
        if layer.grid is not None:
            line = torch.tensor(layer.grid.weights, dtype=torch.float64)
            self._weights_HW = torch.outer(line, line).clamp(min=layer.grid.least_weight)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self.on_tile(whole_place(x_BCHW), x_BCHW)

    def on_tile(self, place: BlockPlace, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the blended scores of a tile at `place`; in training those of windows, each an image."""
        if self.training and self.draws.keys:
            here = x_BCHW.device
            with torch.random.fork_rng([] if here.type == "cpu" else [here], device_type=here.type):
                words = repr(self.draws.keys).encode()
                torch.manual_seed(int.from_bytes(hashlib.sha256(words).digest()[:8], "little"))
                return scores_of(self.module, x_BCHW)
        if self.training or self.rows.grid is None:
            return scores_of(self.module, x_BCHW.contiguous())
        before = generators()
        with _one_thread_a_kernel() as threads:
            copies = self._copies(threads if x_BCHW.device.type == "cpu" else 1)
            blended = [self._blended(self.rows.grid, place, x_CHW, copies) for x_CHW in x_BCHW]
        if generators() != before:
            what = f"{type(self.module).__name__} draws random numbers in evaluation for some crops"
            raise ConfigError(f"{what}, in the order of its calls; let it draw nothing")
        return blended[0][None] if len(blended) == 1 else torch.stack(blended)

    def _blended(
        self, grid: CropGrid, place: BlockPlace, x_CHW: torch.Tensor, copies: Sequence[nn.Module]
    ) -> torch.Tensor:
        """Return the scores of a tile (K, H, W): strip by strip of crops, whose weighted sums are float64."""
        side, width, device = grid.window, x_CHW.shape[2], x_CHW.device
        rows, cols = (grid.needed(dim.read, dim.sizes[0]) for dim in (place.row, place.col))
        weights_HW = self._weights_HW.to(device)
        sums_KHW = torch.zeros(self.rows.classes, side, width, dtype=torch.float64, device=device)
        total_HW = torch.zeros(side, width, dtype=torch.float64, device=device)
        wide = torch.promote_types(x_CHW.dtype, torch.float32)
        weighted_KHW = torch.empty(self.rows.classes, side, side, dtype=torch.float64, device=device)
        scores_KHW = torch.zeros(self.rows.classes, x_CHW.shape[1], width, dtype=wide, device=device)
        for row, following in zip(rows, [*rows[1:], None], strict=True):
            strip_CHW = _taken(x_CHW, 1, row, place.row).contiguous()
            for col, crop_KHW in zip(cols, self._each(strip_CHW, cols, place.col, copies), strict=True):
                tick()
                part = Box(row.used, col.used).relative_to(Box(row.read, col.read)).slices
                to = part[0], col.used.shift(-place.col.read.start).slice
                total_HW[to] += weights_HW[part]
                sums_KHW[:, *to] += torch.mul(crop_KHW, weights_HW, out=weighted_KHW)[:, *part]
            done = Interval(row.read.start, following.read.start if following else row.read.stop)
            own, at = done.clip(place.row.read), place.row.read.start
            lines = own.shift(-row.read.start).slice
            scores_KHW[:, own.shift(-at).slice] = sums_KHW[:, lines] / total_HW[lines].clamp_min(_TINY)
            left = side - done.size
            sums_KHW[:, :left], sums_KHW[:, left:] = sums_KHW[:, done.size :].clone(), 0
            total_HW[:left], total_HW[left:] = total_HW[done.size :].clone(), 0
        return scores_KHW

    def _each(
        self, strip_CHW: torch.Tensor, cols: Sequence[Crop], dim: DimPlace, copies: Sequence[nn.Module]
    ) -> Iterator[torch.Tensor]:
        """Yield the scores of each crop of a strip, in order."""
        kind = strip_CHW.device.type
        cast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        size = self._batch = self._batch or self._crops_at_once(strip_CHW)

        idle = SimpleQueue[nn.Module]()
        for each in copies:
            idle.put(each)

        def load(group: Sequence[Crop]) -> Sequence[torch.Tensor]:
            torch.set_num_threads(1)  # of this thread's kernels
            same = [*group, *[group[-1]] * (size - len(group))]  # always as many
            x_BCHW = torch.stack([_taken(strip_CHW, 2, col, dim) for col in same]).contiguous()
            module = idle.get()
            try:
                with torch.no_grad(), torch.autocast(kind, cast[1], cast[0]):
                    return scores_of(module, x_BCHW)[: len(group)].unbind()
            finally:
                idle.put(module)

        several = len(copies) if len(copies) > 1 else 0
        groups = (cols[first : first + size] for first in range(0, len(cols), size))
        return chain.from_iterable(prefetch(groups, load, several, 2 * several))

    def _copies(self, number: int) -> list[nn.Module]:
        """Return the module, and copies with its weights; the module alone where it cannot be copied."""
        weights = [*self.module.parameters(), *self.module.buffers()]
        with suppress(Exception):  # whatever an attribute raises
            return [self.module, *(copy.deepcopy(self.module, {id(t): t for t in weights}) for _ in range(number - 1))]
        return [self.module]

    def _crops_at_once(self, strip_CHW: torch.Tensor) -> int:
        """Return the crops of a batch: as many as make about a megapixel, if each has the same bits at every place and
        beside any others, else 1."""
        channels, side = strip_CHW.shape[:2]
        most = max(1, min(AT_ONCE.get(strip_CHW.device.type, 16), _PIXELS // side**2))
        noise_BCHW = torch.randn(most, channels, side, side, generator=torch.Generator().manual_seed(0)).to(strip_CHW)
        orders = range(most) if most > 1 else ()
        with torch.no_grad():
            runs = [scores_of(self.module, noise_BCHW.roll(by, 0)).roll(-by, 0) for by in orders]
        return most if all(torch.equal(run, runs[0]) for run in runs) else 1


def _taken(x_CHW: torch.Tensor, axis: int, crop: Crop, dim: DimPlace) -> torch.Tensor:
    """Return the pixels of a crop along rows (1) or columns (2) of what a tile has, mirrored at the image's ends."""
    if dim.read.contains(crop.read):
        return x_CHW.narrow(axis, crop.read.start - dim.read.start, crop.read.size)
    places = mirrored_positions(crop.read, dim.sizes[0]) - dim.read.start
    if places.min() < 0 or places.max() >= dim.read.size:
        raise ConfigError("a tile's halo does not hold its crops whole; leave tiling.halo out")
    return x_CHW.index_select(axis, torch.from_numpy(places).to(x_CHW.device))


@contextmanager
def _one_thread_a_kernel() -> Iterator[int]:
    """Let kernels of a CPU compute on one thread each, in one order of sums; yield the threads that there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)
