"""The footprints of modules that tracing does not look into: declared by a user, or here for those of known packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from torch import nn

from tiledseg.errors import ConfigError

Numbers = int | Sequence[int]  # of rows and columns, or of each


def _of_dim(numbers: Numbers, dim: int) -> int:
    return int(numbers) if isinstance(numbers, int) else int(numbers[dim])


@dataclass(frozen=True)
class Windows:
    """The footprint of attention in windows: an output sees its own window of `size` x `size` pixels. The windows are a
    grid of the image, moved by `shift` pixels, and clipped at the image's ends."""

    size: Numbers
    shift: Numbers = 0

    def along(self, dim: int) -> dict[str, int]:
        """Return the fields of a `DeclaredLeaf` along rows (0) or columns (1)."""
        return {"size": _of_dim(self.size, dim), "shift": _of_dim(self.shift, dim)}


@dataclass(frozen=True)
class Local:
    """The footprint of a neighbourhood: an output sees its `stride` x `stride` inputs and `reach` pixels around them."""

    reach: Numbers = 0
    stride: Numbers = 1

    def along(self, dim: int) -> dict[str, int]:
        """Return the fields of a `DeclaredLeaf` along rows (0) or columns (1)."""
        stride = _of_dim(self.stride, dim)
        return {"reach": _of_dim(self.reach, dim), "stride": stride, "size": stride}


Stated = Windows | Local


def PerPixel() -> Local:
    """Return the footprint of a module that computes each pixel from that pixel alone."""
    return Local(0)


@dataclass(frozen=True)
class Declaration:
    """A footprint, of each module of a class where it is a function; and, from a module and the rows and columns of its
    input, the arguments that it takes besides that."""

    footprint: Stated | Callable[[Any], Stated]
    arguments: Callable[[Any, int, int], tuple[Any, ...]] | None = None

    def of(self, module: nn.Module) -> Stated:
        return self.footprint if isinstance(self.footprint, Stated) else self.footprint(module)


def declare(
    kind: type[nn.Module],
    footprint: Stated | Callable[[Any], Stated],
    arguments: Callable[[Any, int, int], tuple[Any, ...]] | None = None,
) -> None:
    """State what modules of class `kind` (no subclass) see, for all traces from now on: `Windows(size, shift)`,
    `Local(reach, stride)`, `PerPixel()`, or a function of the module that returns one of them.

    `arguments(module, height, width)`: those that it takes after its input, for an input of so many rows and columns.
    The module then is one node. Tracing compares it, in float64, with its declaration, on an image and on parts of it,
    and by the gradients of single pixels; it refuses a footprint that is too small.
    """
    stated = isinstance(footprint, Stated) or (callable(footprint) and not isinstance(footprint, type))
    if not (isinstance(kind, type) and issubclass(kind, nn.Module) and stated):
        what = f"declare takes {getattr(kind, '__name__', kind)!r} and {footprint!r}"
        raise ConfigError(f"{what}; give a class of modules, and Windows(...), Local(...), PerPixel() or a function")
    _DECLARED[f"{kind.__module__}.{kind.__qualname__}"] = Declaration(footprint, arguments)


def declaration(module: nn.Module | None) -> Declaration | None:
    """Return the declaration of a module's class."""
    kind = type(module)
    return _DECLARED.get(f"{kind.__module__}.{kind.__qualname__}")


def common_grid(module: nn.Module) -> int:
    """Return the least number of pixels that the windows of all declared parts of a module fill; 0 without such a part."""
    stated = [found.of(each) for each in module.modules() if (found := declaration(each))]
    return lcm(*(one.along(dim)["size"] for one in stated for dim in (0, 1))) if stated else 0


def _masked(block: Any, height: int, width: int) -> tuple[Any, ...]:
    """Return the mask that MONAI's stages make for their blocks."""
    package: Any = sys.modules[type(block).__module__]
    size = height, width
    windows = package.get_window_size(size, block.window_size, block.shift_size)
    return (package.compute_mask(size, *windows, block.norm1.weight.device),)


def _sized(module: Any, height: int, width: int) -> tuple[Any, ...]:
    return ((height, width),)


def _shipped() -> Iterator[tuple[str, Declaration]]:
    """Yield the blocks and the patch merging of Swin (v1, v2) of known packages."""
    swin, merging = (lambda m: Windows(m.window_size, m.shift_size)), Local(0, 2)
    for name, block in (
        ("swin_transformer", "SwinTransformerBlock"),
        ("swin_transformer_v2", "SwinTransformerV2Block"),
    ):
        yield f"timm.models.{name}.{block}", Declaration(swin)
        yield f"timm.models.{name}.PatchMerging", Declaration(merging)
    yield "monai.networks.nets.swin_unetr.SwinTransformerBlock", Declaration(swin, _masked)
    for block in ("PatchMerging", "PatchMergingV2"):
        yield f"monai.networks.nets.swin_unetr.{block}", Declaration(merging)
        yield f"torchvision.models.swin_transformer.{block}", Declaration(merging)
    for block in ("SwinTransformerBlock", "SwinTransformerBlockV2"):
        name = f"torchvision.models.swin_transformer.{block}"
        yield name, Declaration(lambda m: Windows(m.attn.window_size, m.attn.shift_size))
    for name, kind in (("swin", "Swin"), ("swinv2", "Swinv2")):
        where = f"transformers.models.{name}.modeling_{name}.{kind}"
        yield f"{where}Layer", Declaration(swin, _sized)
        yield f"{where}PatchMerging", Declaration(merging, _sized)


_DECLARED = dict(_shipped())
