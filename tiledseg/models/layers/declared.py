"""The module of a leaf whose footprint is declared: somebody's module, called as its author calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tiledseg.errors import ConfigError
from tiledseg.geometry.layers.declared import DeclaredLeaf, Returned
from tiledseg.geometry.layers.pixelwise import Layout
from tiledseg.models.dropout import LeafDepth
from tiledseg.models.layers.block import BlockModule, BlockPlace, DimPlace
from tiledseg.models.layers.pixelwise import from_layout, to_layout
from tiledseg.models.normalise import Ranks


class DeclaredModule(BlockModule):
    """A module `leaf` of which `describe` states what it sees.

    It takes a tensor in `layout`, `more` arguments for an input of so many rows and columns, and `keywords`. It gives a
    tensor in that layout, or a tuple that begins with one. `depths`: the rates of its stochastic depth, by path.
    """

    rows: DeclaredLeaf
    cols: DeclaredLeaf
    channels = 0  # of the input

    def __init__(
        self,
        leaf: nn.Module,
        layers: tuple[DeclaredLeaf, DeclaredLeaf],
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

    def on_block(self, place: BlockPlace, ranks: Ranks, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Compute the windows of `place.given`. The module's own windows begin at its input's first pixel, so zeros
        stand before and after, up to the next window that is not shifted. No window that is given has a zero in it but
        what the module's mask keeps out. No communication."""
        dims = (place.row, self.rows), (place.col, self.cols)
        (top, bottom), (left, right) = (_beside(dim, layer) for dim, layer in dims)
        y_BCHW = self(functional.pad(x_BCHW, (left, right, top, bottom)))
        row, col = ((dim.read.start - b) // layer.stride for (dim, layer), b in zip(dims, (top, left), strict=True))
        return place.crop(y_BCHW, (row, col))


def _beside(place: DimPlace, layer: DeclaredLeaf) -> tuple[int, int]:
    """Return the positions that stand before and after what is read. Never a single window, which modules take for an
    image without shifted ones: the other one stands where the image does not end."""
    before, after = place.read.start % layer.size, -place.read.stop % layer.size
    single = layer.shift and place.read.size + before + after == layer.size < place.sizes[0]
    more = layer.size if single else 0
    return (before + more, after) if place.read.start else (before, after + more)


class ReturnedModule(BlockModule):
    """A tensor as it is: see `geometry.layers.declared.Returned`."""

    def __init__(self, rows: Returned, cols: Returned) -> None:
        super().__init__(rows, cols)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return x_BCHW

    def on_block(self, place: BlockPlace, ranks: Ranks, x_BCHW: torch.Tensor) -> torch.Tensor:
        return x_BCHW
