"""Modules called in their authors' layout: pointwise functions, and leaves with a declared footprint.

A pointwise function computes a block as it computes an image. If all pixels are the same (after the mean of an image),
one is computed for all.
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

NAMESPACES = (functional, torch, torch.Tensor)


class PixelFunction(BlockModule):
    """The module of `geometry.layers.pixelwise.Pixelwise`. `given`: weights of other modules (None: its own)."""

    def __init__(self, layer: geometry.Pixelwise, given: Weights | None = None) -> None:
        super().__init__(layer)
        self.layer = layer
        self.given = given or Weights([nn.Parameter(torch.ones(shape)) for shape in layer.weights])

    def forward(self, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        tensors = [to_layout(x, layout) for x, layout in zip(inputs_BCHW, self.layer.before, strict=True)]
        y = computed(self.layer, self.given.tensors(), tensors)
        return from_layout(y, self.layer.after, tuple(inputs_BCHW[0].shape))


class Weights(nn.Module):
    """Shared parameters, constants, and buffers of other modules as (module, name), which are looked up at each call,
    since they may be replaced there."""

    def __init__(self, given: Sequence[torch.Tensor | tuple[nn.Module, str]]) -> None:
        super().__init__()
        self._places: list[tuple[Any, str]] = []  # in a list, so that modules are not registered as children
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
        return [getattr(owner, name) for owner, name in self._places]


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return a module's weights and buffers, and those that it looks up in other modules."""
    looked_up = [tensor for each in module.modules() if isinstance(each, Weights) for tensor in each.tensors()]
    return [*module.parameters(), *module.buffers(), *looked_up]


class OnePixel(BlockModule):
    """A pointwise module for a tensor whose pixels are all the same: computes one and expands it."""

    def __init__(self, module: nn.Module, description: Layer) -> None:
        super().__init__(description)
        self.module = module

    def forward(self, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        (x_BCHW,) = inputs_BCHW
        y_BC11: torch.Tensor = self.module(x_BCHW[:, :, :1, :1])
        return y_BC11.expand(-1, -1, *x_BCHW.shape[2:])


def resolve(name: str) -> Any:
    """Return torch's function of this name. Raises AttributeError if there is none."""
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
    """Return torch's cumulative sum; on a GPU with deterministic algorithms, which torch refuses for floats, the
    same."""
    if not (x.device.type != "cpu" and x.is_floating_point() and torch.are_deterministic_algorithms_enabled()):
        return x.cumsum(dim, **keywords)
    return torch.stack(list(accumulate(x.unbind(dim))), dim).to(keywords.get("dtype"))


def to_layout(x_BCHW: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the tensor in the layout of a function's author: a view if possible."""
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
    """Return a function's result as (batch, channels, height, width); `shape`: that of an input."""
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
    """Compute a formula, or the function of a layer, from weights and tensors."""
    arguments = filled(formula.arguments, tensors, weights)
    keywords = {name: filled(value, tensors, weights) for name, value in formula.keywords}
    made = resolve(formula.function)(*arguments, **keywords)
    return made if formula.part is None else made[formula.part]


def filled(
    value: Any,
    tensors: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    constant: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Return an argument with tensors and weights in its slots, formulas computed, and `constant` of all other
    values."""
    if isinstance(value, FormulaSlot):
        return (weights if value.is_weight else tensors)[value.index]
    if isinstance(value, Formula):
        return computed(value, weights)
    if isinstance(value, Cut):
        return slice(*(filled(each, tensors, weights, constant) for each in (value.start, value.stop, value.step)))
    if isinstance(value, tuple):
        return tuple(filled(each, tensors, weights, constant) for each in value)
    return constant(value)


TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


class Computed(nn.Module):
    """A torch module whose weights and buffers are computed from, or looked up in, tensors of other modules at each
    call. `still`: it stays in evaluation, with constant running statistics."""

    given: Weights
    formulas: Mapping[str, Any]
    still = False

    @classmethod
    def of(cls, plain: nn.Module, formulas: Mapping[str, FormulaSlot | Formula], given: Weights) -> Any:
        """Return a copy of `plain` with its tensors given by formulas."""
        made: Any = copy.copy(plain)
        made.__class__ = cls
        made._parameters, made._buffers, made._modules = {}, {}, {}
        made.given, made.formulas = given, formulas
        return made

    def __getattr__(self, name: str) -> Any:
        if name in TENSORS:
            return filled(self.formulas.get(name), (), self.given.tensors())
        return super().__getattr__(name)

    def train(self, mode: bool = True) -> Computed:
        return super().train(mode and not self.still)

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load nothing: the tensors belong to other modules."""


_KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Conv2d: TorchConvolution, InstanceNorm: InstanceNorm}
_KINDS |= {nn.ConvTranspose2d: nn.ConvTranspose2d, GroupNorm: GroupNorm, BatchNorm: BatchNorm}
_KINDS |= {kind: kind for kind in (TimesConvolution, TimesTransposed, TimesBatchNorm, TimesGroupNorm)}
COMPUTED: dict[type[nn.Module], Any] = {
    kind: type(f"Computed{kind.__name__}", (Computed, base), {}) for kind, base in _KINDS.items()
}


class DeclaredModule(BlockModule):
    """A user's module `leaf` with a declared footprint, which `describe` returns.

    It takes a tensor in `layout`, the arguments that `more` returns for (leaf, rows, columns), and `keywords`. It
    returns a tensor in that layout, or a tuple that begins with one. `depths`: its rates of stochastic depth, by path.
    """

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

    def forward(self, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        (x_BCHW,) = inputs_BCHW
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
        """Replace the leaf's stochastic depth, which draws in the order of calls, by draws from keys."""
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

    def on_block(self, place: BlockPlace, ranks: Any, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        """Compute the windows of `place.given`. The leaf's windows begin at its input's first pixel, so the input is
        padded with zeros to whole unshifted windows. Windows in `place.given` contain only zeros that the leaf masks.
        Does not communicate, except for a leaf over the whole image."""
        (x_BCHW,) = inputs_BCHW
        if isinstance(self.rows, WholeLeaf):
            # Collective. Each rank differentiates its own outputs: gradients of weights add up over ranks.
            return self(x_BCHW) if place.is_whole else place.crop(self(gathered(x_BCHW, place, ranks)), (0, 0))
        dims = (place.row, self.rows), (place.col, self.cols)
        (top, bottom), (left, right) = (_beside(dim, layer) for dim, layer in dims)
        y_BCHW = self(functional.pad(x_BCHW, (left, right, top, bottom)))
        row, col = ((dim.read.start - b) // layer.stride for (dim, layer), b in zip(dims, (top, left), strict=True))
        return place.crop(y_BCHW, (row, col))


def _beside(place: DimPlace, layer: Any) -> tuple[int, int]:
    """Return the numbers of zeros before and after the positions read. There are at least two windows, since modules do
    not shift a single one: the second is added on the side where the image goes on."""
    before, after = place.read.start % layer.size, -place.read.stop % layer.size
    single = layer.shift and place.read.size + before + after == layer.size < place.sizes[0]
    more = layer.size if single else 0
    return (before + more, after) if place.read.start else (before, after + more)


class ReturnedModule(BlockModule):
    """The identity: see `geometry.layers.declared.Returned`."""

    def forward(self, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        return inputs_BCHW[0]
