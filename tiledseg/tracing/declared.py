"""The footprints of modules that tracing does not look into, declared by a user (`declare`) or here (`_shipped`).

Also stochastic depth: modules that drop whole images in training (`depth_rate`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from torch import nn

from tiledseg.errors import ConfigError

Numbers = int | Sequence[int]  # one of rows and columns alike, or one of each
DEPTHS = ("DropPath", "StochasticDepth")  # ends of the names of classes
PACKAGES = "timm", "monai", "torchvision", "transformers", "terratorch", "segmentation_models_pytorch"


class StatedFootprint:
    """A declared footprint, given by numbers of rows and columns."""

    def along(self, dim: int) -> dict[str, int]:
        """Return the fields of a `DeclaredLeaf`, or of a `WholeLeaf`, along rows (0) or columns (1)."""
        numbers: dict[str, Numbers] = {"size": getattr(self, "stride", 1), **vars(self)}
        fields = {name: each if isinstance(each, int) else int(each[dim]) for name, each in numbers.items()}
        if not 0 <= fields.get("shift", 0) < fields["size"] or fields.get("reach", 0) < 0:
            raise ConfigError(f"{self} is no footprint; give a size above its shift, a reach from 0, a stride from 1")
        return fields


@dataclass(frozen=True)
class Windows(StatedFootprint):
    """The footprint of attention in windows: an output sees the pixels of its window. Windows of `size` x `size` pixels
    form a grid, which `shift` moves and the image's ends clip."""

    size: Numbers
    shift: Numbers = 0


@dataclass(frozen=True)
class Local(StatedFootprint):
    """The footprint of a neighbourhood: an output sees its `stride` x `stride` inputs and `reach` pixels beside."""

    reach: Numbers = 0
    stride: Numbers = 1


class PerPixel(Local):
    """The footprint of a module that computes each pixel from that pixel alone."""


@dataclass(frozen=True)
class WholeImage(StatedFootprint):
    """The footprint of a module that sees the whole image, and gives as many pixels. Sides are multiples of `size`."""

    size: Numbers = 1


def depth_rate(module: nn.Module) -> float | None:
    """Return the rate at which a module drops whole images in training, for stochastic depth of PACKAGES; None for any
    other module."""
    kind, rate = type(module), getattr(module, "drop_prob", getattr(module, "p", None))
    known = kind.__module__.partition(".")[0] in PACKAGES and kind.__name__.endswith(DEPTHS)
    scales = getattr(module, "scale_by_keep", True) and getattr(module, "mode", "row") == "row"
    hooked = module._forward_hooks or module._forward_pre_hooks
    return float(rate) if known and scales and not hooked and isinstance(rate, int | float) else None


def depths_of(module: nn.Module) -> dict[str, float]:
    """Return the rates above 0 of the stochastic depths inside a module, by their paths."""
    found = ((path, depth_rate(each)) for path, each in module.named_modules() if path)
    return {path: rate for path, rate in found if rate}


Arguments = Callable[[Any, int, int], tuple[Any, ...]]


@dataclass(frozen=True)
class Declaration:
    """The declaration of a class of modules. `footprint`: of all its modules, or a function of a module. `arguments`: a
    function of a module and its input's rows and columns that returns the further arguments."""

    footprint: StatedFootprint | Callable[[Any], StatedFootprint]
    arguments: Arguments | None = None

    def of(self, module: nn.Module) -> StatedFootprint:
        return self.footprint if isinstance(self.footprint, StatedFootprint) else self.footprint(module)


def declare(
    kind: type[nn.Module],
    footprint: StatedFootprint | Callable[[Any], StatedFootprint],
    arguments: Arguments | None = None,
) -> None:
    """State what modules of class `kind` (no subclass) see, for all traces from now on: `Windows(size, shift)`,
    `Local(reach, stride)`, `PerPixel()`, `WholeImage(size)`, or a function of the module that returns one of them.

    `arguments(module, height, width)`: the arguments after its input, for an input of `height` x `width` pixels. The
    module then is one node. Tracing checks the declaration in float64, on an image, on parts of it, and by gradients of
    single pixels; it refuses a footprint that is too small.
    """
    stated = isinstance(footprint, StatedFootprint) or (callable(footprint) and not isinstance(footprint, type))
    if not (isinstance(kind, type) and issubclass(kind, nn.Module) and stated):
        what = f"declare takes {getattr(kind, '__name__', kind)!r} and {footprint!r}; give a class of modules"
        raise ConfigError(f"{what}, and Windows(...), Local(...), PerPixel(), WholeImage() or a function")
    _DECLARED[f"{kind.__module__}.{kind.__qualname__}"] = Declaration(footprint, arguments)


def declaration(module: nn.Module | None) -> Declaration | None:
    """Return the declaration of a module's class."""
    kind = type(module)
    return _DECLARED.get(f"{kind.__module__}.{kind.__qualname__}")


def window_sizes(module: nn.Module) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return pairs of sizes that are multiples of the windows of declared modules; none without such windows."""
    stated = [found.of(each) for each in module.modules() if (found := declaration(each))]
    grid = lcm(*(one.along(dim)["size"] for one in stated for dim in (0, 1)))
    return [((2 * n, 3 * n), (4 * n, 2 * n)) for n in (8 * grid, 16 * grid, 32 * grid)] if grid > 1 else []


def _masked(block: Any, height: int, width: int) -> tuple[Any, ...]:
    """Return the mask that MONAI's stages make for their blocks."""
    package: Any = sys.modules[type(block).__module__]
    size = height, width
    windows = package.get_window_size(size, block.window_size, block.shift_size)
    return (package.compute_mask(size, *windows, block.norm1.weight.device),)


def _shipped() -> Iterator[tuple[str, Declaration]]:
    """Yield the blocks and the patch merging of Swin (v1, v2) of known packages."""
    swin, merging = (lambda m: Windows(m.window_size, m.shift_size)), Local(0, 2)
    monai, vision = "monai.networks.nets.swin_unetr", "torchvision.models.swin_transformer"
    yield f"{monai}.SwinTransformerBlock", Declaration(swin, _masked)
    for v2, low in (("", ""), ("V2", "v2")):
        timm = f"timm.models.swin_transformer{low and '_v2'}"
        yield f"{timm}.SwinTransformer{v2}Block", Declaration(swin)
        yield (
            f"{vision}.SwinTransformerBlock{v2}",
            Declaration(lambda m: Windows(m.attn.window_size, m.attn.shift_size)),
        )
        for merges in (f"{timm}.PatchMerging", f"{monai}.PatchMerging{v2}", f"{vision}.PatchMerging{v2}"):
            yield merges, Declaration(merging)
        hugging = f"transformers.models.swin{low}.modeling_swin{low}.Swin{low}"
        for kind, footprint in (("Layer", swin), ("PatchMerging", merging)):
            yield f"{hugging}{kind}", Declaration(footprint, lambda module, height, width: ((height, width),))


_DECLARED = dict(_shipped())
