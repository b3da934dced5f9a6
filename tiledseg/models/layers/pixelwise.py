"""Modules called in the layout of their authors: functions of single pixels, and leaves whose footprint is declared.

No pixel of a function's output looks at another pixel, so a block is computed as an image is. Where all pixels are the
same (after the mean of an image), one is computed for all.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tiledseg.errors import ConfigError
from tiledseg.geometry.layers import pixelwise as geometry
from tiledseg.geometry.layers.declared import DeclaredLeaf, WholeLeaf
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.layers.pixelwise import Cut, Formula, FormulaSlot, Layout
from tiledseg.models.dropout import LeafDepth
from tiledseg.models.layers.attention import gathered
from tiledseg.models.layers.block import BlockModule, BlockPlace, DimPlace
from tiledseg.models.layers.convolution import TorchConvolution
from tiledseg.models.layers.times import TimesBatchNorm, TimesConvolution, TimesGroupNorm, TimesTransposed
from tiledseg.models.norm import BatchNorm, GroupNorm, InstanceNorm
from tiledseg.models.normalise import Ranks

NAMESPACES = (functional, torch, torch.Tensor)


class PixelFunction(BlockModule):
    """See `geometry.layers.pixelwise.Pixelwise`. Its weights are `given`, those of other modules, or its own."""

    def __init__(self, layer: geometry.Pixelwise, given: Weights | None = None) -> None:
        super().__init__(layer)
        self.layer = layer
        self.given = given or Weights([nn.Parameter(torch.ones(shape)) for shape in layer.weights])

    def forward(self, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        tensors = [to_layout(x, layout) for x, layout in zip(inputs_BCHW, self.layer.before, strict=True)]
        y = computed(self.layer, self.given.tensors(), tensors)
        return from_layout(y, self.layer.after, tuple(inputs_BCHW[0].shape))

    def on_block(self, place: BlockPlace, ranks: Ranks, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        return self.forward(*inputs_BCHW)


class Weights(nn.Module):
    """Parameters that are shared with whoever made them, constants, and buffers of other modules (module and name),
    which are looked up each time: they may be replaced there."""

    def __init__(self, given: Sequence[torch.Tensor | tuple[nn.Module, str]]) -> None:
        super().__init__()
        self._places: list[tuple[Any, str]] = []  # not modules of this one: a list hides them
        for index, value in enumerate(given):
            if isinstance(value, tuple):
                self._places.append(value)
                continue
            if isinstance(value, nn.Parameter):
                self.register_parameter(f"weight{index}", value)
            else:
                self.register_buffer(f"weight{index}", value, persistent=False)
            self._places.append((self, f"weight{index}"))

    def tensors(self) -> list[torch.Tensor]:
        """Return them in their order."""
        return [getattr(owner, name) for owner, name in self._places]


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return a module's weights and buffers, and those of other modules that it looks up."""
    looked_up = [tensor for each in module.modules() if isinstance(each, Weights) for tensor in each.tensors()]
    return [*module.parameters(), *module.buffers(), *looked_up]


class OnePixel(BlockModule):
    """A module that sees one pixel, for a tensor whose pixels are all the same: computed once."""

    def __init__(self, module: nn.Module, description: Layer) -> None:
        super().__init__(description)
        self.module = module

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        y_BC11: torch.Tensor = self.module(x_BCHW[:, :, :1, :1])
        return y_BC11.expand(-1, -1, *x_BCHW.shape[2:])

    def on_block(self, place: BlockPlace, ranks: Ranks, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self.forward(x_BCHW)


def resolve(name: str) -> Any:
    """Return the function of torch of this name. Raises AttributeError where there is none."""
    if name.removeprefix("Tensor.") == "cumsum":
        return cumsum
    plain = name.removeprefix("Tensor.")
    for space in NAMESPACES if plain == name else (torch.Tensor,):
        found = getattr(space, plain, None)
        if callable(found):
            return found
        if found is not None:
            return lambda tensor: getattr(tensor, plain)  # a property
    raise AttributeError(f"torch has no function {name}")


def cumsum(x: torch.Tensor, dim: int, **keywords: Any) -> torch.Tensor:
    """Add up as torch's, which refuses numbers on a GPU where algorithms are to be deterministic."""
    if not (x.device.type != "cpu" and x.is_floating_point() and torch.are_deterministic_algorithms_enabled()):
        return x.cumsum(dim, **keywords)
    return torch.stack(list(accumulate(x.unbind(dim))), dim).to(keywords.get("dtype"))


def to_layout(x_BCHW: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the tensor as the author of a function sees it: a view where torch can give one."""
    if layout == Layout():
        return x_BCHW
    if layout.one_pixel:
        x_BCHW = x_BCHW[:, :, :1, :1]
    factors = layout.channels or (x_BCHW.shape[1],)
    split = x_BCHW.unflatten(1, factors) if len(factors) > 1 else x_BCHW
    atoms = _atoms(len(factors))
    order = [atom for dim in layout.dims for atom in dim]
    left_out = [atom for atom in atoms if atom not in order]
    moved = split.permute([atoms.index(atom) for atom in (*order, *left_out)])
    sizes = dict(zip(atoms, split.shape, strict=True))
    return moved.reshape([math.prod(sizes[atom] for atom in dim) for dim in layout.dims])


def from_layout(y: torch.Tensor, layout: Layout, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor (batch, channels, height, width) of a function's result; `shape`: that of one of its inputs."""
    if layout == Layout():
        return y
    batch, _, height, width = shape
    pixels = (1, 1) if layout.one_pixel else (height, width)
    factors = layout.channels or (y.numel() // (batch * pixels[0] * pixels[1]),)
    atoms = _atoms(len(factors))
    sizes = dict(zip(atoms, (batch, *factors, *pixels), strict=True))
    order = [atom for dim in layout.dims for atom in dim]
    left_out = [atom for atom in atoms if atom not in order]
    apart = y.reshape([sizes[atom] for atom in (*order, *left_out)])
    x = apart.permute([(*order, *left_out).index(atom) for atom in atoms]).flatten(1, len(factors))
    return x.expand(-1, -1, height, width) if layout.one_pixel else x


def _atoms(factors: int) -> tuple[str, ...]:
    return ("B", *(f"C{index}" for index in range(factors)), "H", "W")


def computed(formula: Any, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Compute a formula, or the function of a layer, for these weights and tensors."""
    arguments = _filled(formula.arguments, tensors, weights)
    keywords = {name: _filled(value, tensors, weights) for name, value in formula.keywords}
    made = resolve(formula.function)(*arguments, **keywords)
    result: torch.Tensor = made if formula.part is None else made[formula.part]
    return result


def _filled(value: Any, tensors: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, FormulaSlot):
        return (weights if value.is_weight else tensors)[value.index]
    if isinstance(value, Formula):
        return computed(value, weights)
    if isinstance(value, Cut):
        return slice(value.start, value.stop, value.step)
    if isinstance(value, tuple):
        return tuple(_filled(each, tensors, weights) for each in value)
    return value


TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


class Computed(nn.Module):
    """A module of torch's whose tensors are computed each time, or looked up, in the tensors of other modules. `still`:
    it stays in evaluation, so that its running statistics are constants."""

    given: Weights
    formulas: Mapping[str, Any]
    still = False

    @classmethod
    def of(cls, plain: nn.Module, formulas: Mapping[str, FormulaSlot | Formula], given: Weights) -> Any:
        """Return `plain` with the tensors that these formulas give."""
        made: Any = copy.copy(plain)
        made.__class__ = cls
        made._parameters, made._buffers, made._modules = {}, {}, {}
        made.given, made.formulas = given, formulas
        return made

    def __getattr__(self, name: str) -> Any:
        if name in TENSORS:
            return _filled(self.formulas.get(name), (), self.given.tensors())
        return super().__getattr__(name)

    def train(self, mode: bool = True) -> Computed:
        return super().train(mode and not self.still)

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load nothing: its tensors have their names elsewhere."""


_KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Conv2d: TorchConvolution, InstanceNorm: InstanceNorm}
_KINDS |= {nn.ConvTranspose2d: nn.ConvTranspose2d, GroupNorm: GroupNorm, BatchNorm: BatchNorm}
_KINDS |= {kind: kind for kind in (TimesConvolution, TimesTransposed, TimesBatchNorm, TimesGroupNorm)}
COMPUTED: dict[type[nn.Module], Any] = {
    kind: type(f"Computed{kind.__name__}", (Computed, base), {}) for kind, base in _KINDS.items()
}


class DeclaredModule(BlockModule):
    """A module `leaf` of which `describe` states what it sees.

    It takes a tensor in `layout`, `more` arguments for an input of so many rows and columns, and `keywords`. It gives a
    tensor in that layout, or a tuple that begins with one. `depths`: the rates of its stochastic depth, by path.
    """

    rows: DeclaredLeaf | WholeLeaf
    cols: DeclaredLeaf | WholeLeaf
    channels = 0  # of the input

    def __init__(
        self,
        leaf: nn.Module,
        layers: tuple[DeclaredLeaf | WholeLeaf, DeclaredLeaf | WholeLeaf],
        layout: Layout,
        describe: Callable[[nn.Module], object],
        more: Callable[..., tuple[Any, ...]] | None,
        keywords: Mapping[str, Any],
        depths: Mapping[str, float],
    ) -> None:
        super().__init__(*layers)
        self.leaf, self.layout, self.more, self.keywords = leaf, layout, more, dict(keywords)
        self.describe, self.described = describe, describe(leaf)
        self.depths = [LeafDepth(path, rate) for path, rate in depths.items()]
        self.drawn = nn.ModuleList(self.depths)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        batch, _, *size = x_BCHW.shape
        more = () if self.more is None else self.more(self.leaf, *size)
        with self._drawing(batch) if self.depths and self.training else nullcontext():
            given = self.leaf(to_layout(x_BCHW, self.layout), *more, **self.keywords)
        y = given[0] if isinstance(given, tuple | list) else given
        if self.describe(self.leaf) != self.described:
            what = f"for {size[0]} x {size[1]} pixels {type(self.leaf).__name__} has {self.describe(self.leaf)}"
            raise ConfigError(f"{what}, for others {self.described}; give it images of more than a window a side")
        height, width = (side // layer.stride for side, layer in zip(size, (self.rows, self.cols), strict=True))
        return from_layout(y, self.layout, (batch, 0, height, width))

    @contextmanager
    def _drawing(self, images: int) -> Iterator[None]:
        """Put draws by keys in the places of the leaf's stochastic depth, which draws by the order of calls."""
        paths = [depth.path.rpartition(".") for depth in self.depths]
        places = [(self.leaf.get_submodule(owner)._modules, name) for owner, _, name in paths]
        theirs = [modules[name] for modules, name in places]
        try:
            for (modules, name), depth in zip(places, self.depths, strict=True):
                modules[name], depth.images, depth.calls = depth, images, 0
            yield
        finally:
            for (modules, name), depth, module in zip(places, self.depths, theirs, strict=True):
                modules[name], depth.name, depth.images, depth.calls = module, "", 0, 0

    def on_block(self, place: BlockPlace, ranks: Any, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Compute the windows of `place.given`. The module's own windows begin at its input's first pixel, so zeros
        stand before and after, up to the next window that is not shifted. No window that is given has a zero in it but
        what the module's mask keeps out. No communication, but of a leaf that sees the whole image."""
        if isinstance(self.rows, WholeLeaf):
            # Collective. Each rank backpropagates from its own outputs: gradients of weights add up over ranks.
            return self(x_BCHW) if place.is_whole else place.crop(self(gathered(x_BCHW, place, ranks)), (0, 0))
        dims = (place.row, self.rows), (place.col, self.cols)
        (top, bottom), (left, right) = (_beside(dim, layer) for dim, layer in dims)
        y_BCHW = self(functional.pad(x_BCHW, (left, right, top, bottom)))
        row, col = ((dim.read.start - b) // layer.stride for (dim, layer), b in zip(dims, (top, left), strict=True))
        return place.crop(y_BCHW, (row, col))


def _beside(place: DimPlace, layer: Any) -> tuple[int, int]:
    """Return the positions that stand before and after what is read. Never a single window, which modules take for an
    image without shifted ones: the other one stands where the image does not end."""
    before, after = place.read.start % layer.size, -place.read.stop % layer.size
    single = layer.shift and place.read.size + before + after == layer.size < place.sizes[0]
    more = layer.size if single else 0
    return (before + more, after) if place.read.start else (before, after + more)


class ReturnedModule(BlockModule):
    """A tensor as it is: see `geometry.layers.declared.Returned`."""

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return x_BCHW

    def on_block(self, place: BlockPlace, ranks: Ranks, x_BCHW: torch.Tensor) -> torch.Tensor:
        return x_BCHW
