"""A module that is not traced, as a network of one node: mapped by crops of one size, or on whole images (decision
0020).

The bits of a crop's scores must not depend on its tile, its rank, or the crops beside it. So crops run in batches of
one size if a measurement shows that place and neighbours in a batch change no bit, else one by one. On a CPU a kernel
has one thread, and several threads run a batch each.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import chain, islice, product
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tiledseg.comm.doing import tick
from tiledseg.errors import ConfigError, first_line
from tiledseg.geometry.box import Box
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.declared import Crop, CropGrid, Crops
from tiledseg.memory.allocations import is_exhausted, kept_for
from tiledseg.models.dropout import ChannelDropout
from tiledseg.models.layers.block import BlockModule, BlockPlace, DimPlace
from tiledseg.models.layers.pixelwise import tensors_of
from tiledseg.models.network import GraphNetwork
from tiledseg.raster.mirrored_reader import mirrored_positions, prefetch
from tiledseg.system.freed_memory import give_back_freed
from tiledseg.tracing.state import class_state, drawn_from, generators, in_mode, is_same, kept_state
from tiledseg.units import SINGLE_BYTES

AT_ONCE = {"cpu": 2**18}  # pixels of a batch of crops by the kind of device; a crop counts as 2**16 at least
Place = tuple[Crop, Crop]  # rows and columns of one crop
_KEPT_BYTES = 3 * 2**23  # most of the scores of crops that are kept for the next tiles


def crops_network(
    module: nn.Module, bands: int, grid: CropGrid, classes: int | None = None, trains: bool = False
) -> GraphNetwork:
    """Return the network that runs an untraced module on crops, with the module's weights under their names.

    `classes`: the number of classes that the module must give (None: 2 to 255). `trains`: train on windows of a crop's
    size. Raises ConfigError if the module does not run on a crop, gives other sizes, draws numbers, or keeps state.
    """
    name, side = type(module).__name__, grid.window
    norms = [path for path, each in module.named_modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    if trains and norms:
        what = f"'{norms[0]}' of {name} takes statistics over windows, which the number of ranks would change"
        raise ConfigError(f"{what}; use another norm, or train without model.window")
    weight = next((p for p in module.parameters() if p.is_floating_point()), torch.zeros(()))
    draw = torch.Generator().manual_seed(0)
    first_BCHW, next_BCHW = torch.randn(2, 1, bands, side, side, generator=draw).to(weight.device, weight.dtype)
    with _one_thread(), in_mode(module, False), kept_state(module) as changes, torch.no_grad():
        before = generators()
        one = scores_of(module, first_BCHW.clone())  # a module may write over its input
        scores_of(module, next_BCHW)
        before_again = class_state(module)
        with kept_state(module) as later:
            again = scores_of(module, first_BCHW.clone())
        if generators() != before or not torch.equal(one, again):
            raise ConfigError(f"{name} gives other scores at its next call; let it draw and keep nothing in evaluation")
        layout = _layout(module, first_BCHW, one)
    for buffer in changes.buffers:
        raise ConfigError(f"{name} changes its buffer '{buffer}' in evaluation; leave it to training")
    if later.attributes or not is_same(before_again, class_state(module)):
        where = f"its attribute '{later.attributes[0]}'" if later.attributes else "a class of it, or a global name,"
        what = f"{name} changes {where} at every call in evaluation"
        raise ConfigError(f"{what}, which may change its scores; leave it to training")
    channels = one.shape[1]
    if channels != (classes or channels) or not 2 <= channels <= 255:
        raise ConfigError(f"{name} gives {channels} channels for {classes or '2 to 255'} classes; give each class one")
    cost = 0, 0
    if trains:  # bytes that autograd keeps of a crop besides weights, and multiply-adds of a pixel
        with in_mode(module, True), kept_state(module, False), drawn_from(0), torch.enable_grad():
            scores_BKHW, kept, work = kept_for(lambda: scores_of(module, first_BCHW.clone()), tensors_of(module))
        with in_mode(module, True), kept_state(module, False), drawn_from(0), torch.no_grad():
            layout = layout if layout == _layout(module, first_BCHW, scores_BKHW) else torch.contiguous_format
        cost = kept * SINGLE_BYTES // first_BCHW.element_size(), work // scores_BKHW[0, 0].numel()
    return untraced(module, bands, Crops(grid, channels, 0, *cost), layout)


def _layout(module: nn.Module, x_BCHW: torch.Tensor, scores_BKHW: torch.Tensor) -> torch.memory_format:
    """Return channels last, which is faster for convolutions that overlap, if the scores stay the same: norms may
    change them."""
    dims = (zip(m.kernel_size, m.stride, strict=True) for m in module.modules() if isinstance(m, nn.Conv2d))
    if not any(kernel > stride for kernel, stride in chain.from_iterable(dims)):
        return torch.contiguous_format
    with suppress(ConfigError):  # such as of .view, which needs contiguous channels
        found_BKHW = scores_of(module, x_BCHW.clone(memory_format=torch.channels_last))
        if (found_BKHW - scores_BKHW).abs().max() <= 16 * torch.finfo(x_BCHW.dtype).eps * scores_BKHW.abs().max():
            return torch.channels_last
    return torch.contiguous_format


def untraced(
    module: nn.Module, bands: int, layer: Crops, layout: torch.memory_format = torch.contiguous_format
) -> GraphNetwork:
    """Return the network that runs an untraced module on crops, or on whole images on one rank."""
    layer = replace(layer, weights=sum(parameter.numel() for parameter in module.parameters()))
    return GraphNetwork(Graph((Node("crops", layer),)), bands, [CropModule(layer, module, layout)], module)


def scores_of(module: nn.Module, x_BCHW: torch.Tensor) -> torch.Tensor:
    """Return the first tensor that a module returns. Raise ConfigError if the module does not run on the input, or the
    tensor does not hold scores of each pixel."""
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
    """The module of the layer `Crops`. Each thread runs its own copy of the user's module, with shared weights, since a
    forward may pass tensors by attributes."""

    def __init__(self, layer: Crops, module: nn.Module, layout: torch.memory_format) -> None:
        super().__init__(layer)
        self.module, self.layout = module, layout
        self.draws = ChannelDropout("crops", 0.0)  # its keys seed what the module draws in training
        self.kept: dict[Place, torch.Tensor] | None = None  # `kept_between_tiles`, like the next
        self._copies: Sequence[nn.Module] = ()
        self._batch: tuple[Any, int] = None, 1  # crops of a batch, with the dtype and weights of the measurement
        if layer.grid is not None:
            line = torch.tensor(layer.grid.weights, dtype=torch.float64)
            self._weights_HW = torch.outer(line, line).clamp(min=1e-3 if layer.grid.blend == "gaussian" else 0.0)

    def on_block(self, place: BlockPlace, ranks: Any, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the blended scores of a tile at `place`; in training the scores of a batch of windows."""
        (x_BCHW,) = inputs_BCHW
        if self.training or self.rows.grid is None:
            here, keys = x_BCHW.device, self.draws.keys if self.training else ()
            with torch.random.fork_rng([] if here.type == "cpu" else [here], bool(keys), device_type=here.type):
                if keys:
                    torch.manual_seed(int.from_bytes(hashlib.sha256(repr(keys).encode()).digest()[:8], "little"))
                return scores_of(self.module, x_BCHW.contiguous(memory_format=self.layout))
        if self.kept and sum(each.nbytes for each in self.kept.values()) > _KEPT_BYTES // 2:
            give_back_freed()  # else ever more of it lies between kept scores
        with _one_thread() as threads:
            self._choose_batch(x_BCHW[0])  # before copies are made: a first call may set attributes
            copies, before = self._copies or self._copied(threads if x_BCHW.device.type == "cpu" else 1), generators()
            self._copies = copies if self.kept is not None else ()
            with ExitStack() as stack:
                changes = [stack.enter_context(kept_state(each)) for each in copies]
                blended = [self._blended(self.rows.grid, place, x_CHW, copies) for x_CHW in x_BCHW]
        moved = [f"changes '{name}'" for each in changes for name in (*each.attributes, *each.buffers)]
        if moved or generators() != before:
            what = f"{type(self.module).__name__} {[*moved, 'draws random numbers'][0]} in evaluation for some crops"
            raise ConfigError(f"{what}, in the order of its calls; leave it to training")
        return blended[0][None] if len(blended) == 1 else torch.stack(blended)

    def _blended(
        self, grid: CropGrid, place: BlockPlace, x_CHW: torch.Tensor, copies: Sequence[nn.Module]
    ) -> torch.Tensor:
        """Return the scores (K, H, W) of a tile, by weighted sums of crops; values beyond its core are undefined."""
        dims, device, side = (place.row, place.col), x_CHW.device, grid.window
        context, core = Box(*(d.read for d in dims)), Box(*(grid.core(d.read, d.sizes[0]) for d in dims))
        rows, cols = (grid.needed(dim.read, dim.sizes[0]) for dim in dims)
        crops = [*product(rows, cols)]
        mine = {each: self.kept.pop(each) for each in crops if self.kept and each in self.kept}
        missing = {(row, col): max(core.row.start, row.used.start) - row.read.stop for row, col in mine}
        kept = {each: rows_KHW for each, rows_KHW in mine.items() if rows_KHW.shape[1] + missing[each] >= 0}
        computed = self._each(x_CHW, [each for each in crops if each not in kept], place, copies)
        made = chain([*islice(computed, 1)], computed)  # threads begin before the sums' memory is cleared
        wide = torch.promote_types(x_CHW.dtype, torch.float32)
        weights_HW = self._weights_HW.to(device, wide)
        scores_KHW = torch.empty(self.rows.out_channels, *context.shape, dtype=wide, device=device)
        sums_KHW = scores_KHW[:, *core.relative_to(context).slices].zero_()
        total_HW = torch.zeros(core.shape, dtype=wide, device=device)
        for row, col in crops:
            tick()
            crop_KHW = kept.pop((row, col)) if (row, col) in kept else next(made)
            used = Box(row.used, col.used).clip(core)
            part, to = used.relative_to(Box(row.read, col.read)), used.relative_to(core).slices
            part_KHW = crop_KHW[:, *part.shift(crop_KHW.shape[1] - side, 0).slices]  # of its last rows, if kept
            total_HW[to] += weights_HW[part.slices]
            sums_KHW[:, *to] += torch.mul(part_KHW, weights_HW[part.slices], out=sums_KHW.new_empty(part_KHW.shape))
            self._keep(row, col, core, crop_KHW)
        sums_KHW /= total_HW
        return scores_KHW

    def _keep(self, row: Crop, col: Crop, core: Box, scores_KHW: torch.Tensor) -> None:
        """Keep a crop's last rows for the tiles to the right and below. Drop the oldest beyond _KEPT_BYTES."""
        if self.kept is not None and (row.used.stop > core.row.stop or col.used.stop > core.col.stop):
            rows = scores_KHW.shape[1] if col.used.stop > core.col.stop else row.read.stop - core.row.stop
            self.kept[row, col] = scores_KHW[:, -rows:].clone()
            while sum(each.nbytes for each in self.kept.values()) > _KEPT_BYTES:
                del self.kept[next(iter(self.kept))]

    def _each(
        self, x_CHW: torch.Tensor, crops: Sequence[Place], place: BlockPlace, copies: Sequence[nn.Module]
    ) -> Iterator[torch.Tensor]:
        """Yield the scores of each crop of a tile, in order, computed in batches by threads."""
        (_, kind, cast, _), size = self._batch
        idle = SimpleQueue[nn.Module]()
        for each in copies:
            idle.put(each)

        def load(group: Sequence[Place]) -> Sequence[torch.Tensor]:
            torch.set_num_threads(1)  # each thread has its own number
            same = [*group, *[group[-1]] * (size - len(group))]  # a batch always has `size` crops
            x_BCHW = self._empty(x_CHW, size)
            for into_CHW, (row, col) in zip(x_BCHW, same, strict=True):
                into_CHW.copy_(_read(_read(x_CHW, 2, col, place.col), 1, row, place.row))
            module = idle.get()
            try:
                with torch.no_grad(), torch.autocast(kind, cast[1], cast[0]):
                    return scores_of(module, x_BCHW)[: len(group)].unbind()
            finally:
                idle.put(module)

        several = len(copies) if len(copies) > 1 else 0
        groups = (crops[first : first + size] for first in range(0, len(crops), size))
        return chain.from_iterable(prefetch(groups, load, several, 2 * several))

    def _copied(self, number: int) -> list[nn.Module]:
        """Return the module and `number` - 1 copies that share its weights; the module alone if it cannot be copied."""
        number = 1 if any(isinstance(each, torch.jit.ScriptModule) for each in self.module.modules()) else number
        with suppress(Exception):  # whatever an attribute raises
            shared = [{id(tensor): tensor for tensor in tensors_of(self.module)} for _ in range(number - 1)]
            return [self.module, *(copy.deepcopy(self.module, each) for each in shared)]
        return [self.module]

    def _choose_batch(self, x_CHW: torch.Tensor) -> None:
        """Choose the number of crops of a batch again if weights or the dtype have changed."""
        weights, kind = tensors_of(self.module), x_CHW.device.type
        cast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        state = x_CHW.dtype, kind, cast, [(id(each), each.is_inference() or each._version) for each in weights]
        if self._batch[0] != state:
            self._batch = state, self._crops_at_once(x_CHW)

    def _crops_at_once(self, x_CHW: torch.Tensor) -> int:
        """Return the number of crops of a batch: AT_ONCE, if a crop's scores have the same bits at each place of a
        batch, and beside far brighter crops and crops of zeros; else 1."""
        most = max(1, AT_ONCE.get(x_CHW.device.type, 2**20) // max(2**16, self._weights_HW.numel()))
        draw, batch_BCHW = torch.Generator().manual_seed(0), self._empty(x_CHW, most)
        noise_BCHW = torch.randn(batch_BCHW.shape, generator=draw).to(x_CHW) / 10
        factors = torch.tensor([1, -10000, 0, 1]).repeat(most)[:most, None, None, None]
        with torch.no_grad(), suppress(ConfigError):  # of a module that takes one image
            alike_BKHW = scores_of(self.module, batch_BCHW.copy_(noise_BCHW[0])).clone()
            beside_BKHW = scores_of(self.module, batch_BCHW.copy_(noise_BCHW * factors.to(x_CHW)))
            if all(torch.equal(y_KHW, beside_BKHW[0]) for y_KHW in alike_BKHW):
                return most
        return 1

    def _empty(self, x_CHW: torch.Tensor, number: int) -> torch.Tensor:
        """Return an uninitialised batch of crops in the dtype and on the device of a tile."""
        shape = number, len(x_CHW), *self._weights_HW.shape
        return torch.empty(shape, dtype=x_CHW.dtype, device=x_CHW.device, memory_format=self.layout)


@contextmanager
def _one_thread() -> Iterator[int]:
    """Give kernels one thread inside, so that their sums have one order. Yield the number of threads outside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


@contextmanager
def kept_between_tiles(network: nn.Module) -> Iterator[None]:
    """Let `network` keep the scores of crops that later tiles need too, and copies of its module for the threads.
    Inside, it must run only on the tiles of one image, row by row, with unchanged weights."""
    modules = [module for module in network.modules() if isinstance(module, CropModule)]
    for module in modules:
        module.kept = {}
    try:
        yield
    finally:
        for module in modules:
            module.kept, module._copies = None, ()


def _read(x_CHW: torch.Tensor, axis: int, crop: Crop, dim: DimPlace) -> torch.Tensor:
    """Return the part of a tile that a crop reads along rows (1) or columns (2), mirrored at the image's ends."""
    if dim.read.contains(crop.read):
        return x_CHW.narrow(axis, crop.read.start - dim.read.start, crop.read.size)
    places = mirrored_positions(crop.read, dim.sizes[0]) - dim.read.start
    if places.min() < 0 or places.max() >= dim.read.size:
        raise ConfigError("a tile's halo does not hold its crops whole; leave tiling.halo out")
    return x_CHW.index_select(axis, torch.from_numpy(places).to(x_CHW.device))
