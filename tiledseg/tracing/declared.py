"""The footprints of modules that tracing does not look into, declared by a user (`declare`) or here (`_shipped`).

Also stochastic depth: modules that drop whole images in training (`depth_rate`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import sqrt
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tiledseg.errors import ConfigError
from tiledseg.tracing.state import drawn_from

Numbers = int | Sequence[int]  # one of rows and columns alike, or one of each
DEPTHS = ("DropPath", "StochasticDepth")  # ends of the names of classes
IMAGES = 1 << 16  # images in the statistical test of such a module
# Shapes for which it must call the same kernels, of tokens, images and times: small and vast, to find branches.
SHAPES = (2, 6, 4), (3, 70_000, 96), (1, 3, 5, 7), (8, 64, 70_000, 24), (5, 2_100, 24, 70_000), (2, 3, 4, 64, 96)
MAKES = (
    "new_empty",
    "new_ones",
    "new_zeros",
    "new_full",
    "empty_like",
    "ones_like",
    "zeros_like",
)  # kernels that read no values
SCALES = "mul", "mul_", "div", "div_", "clone", "detach", "alias"


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
    """Return the rate at which a module drops whole images in training, as stochastic depth of timm, MONAI, torchvision
    and transformers does; None for any other module. The class's name, a statistical test and `_only_scales` tell."""
    rate = getattr(module, "drop_prob", getattr(module, "p", None))
    named = type(module).__name__.endswith(DEPTHS) and not module._forward_hooks and not module._forward_pre_hooks
    if not named or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        return None
    x_BCHW, mode = torch.ones(IMAGES, 2, 1, 1), module.training
    try:
        with drawn_from(0), torch.no_grad():
            still_BCHW, y_BCHW = module.train(False)(x_BCHW.clone()), module.train(True)(x_BCHW.clone())
    except Exception:  # whatever the module raises
        return None
    finally:
        module.train(mode)
    dropped, expected = (y_BCHW == 0).all(1), IMAGES * rate
    scaled_BCHW = torch.where(dropped[:, None], 0.0, x_BCHW / (1 - rate or 1.0))
    near = abs(int(dropped.sum()) - expected) <= 6 * sqrt(expected * (1 - rate)) and (expected > 40 or rate == 0)
    near = near and torch.equal(still_BCHW, x_BCHW) and torch.allclose(y_BCHW, scaled_BCHW)
    return float(rate) if near and (rate == 0 or _only_scales(module)) else None


def _only_scales(module: nn.Module) -> bool:
    """Return True if a module, by the kernels that it calls for tensors without values, only multiplies its input by
    numbers. In training it draws them, one an image; shape and dtype change nothing."""
    mode, held = module.training, _held(module)
    own = vars(module).keys() - vars(nn.Module()).keys() - held.keys()
    parts = module._modules, module._parameters, module._buffers
    alike = None if own or any(parts) else (type(module), tuple(sorted(held.items(), key=str)))
    if alike in _SCALING:
        return True
    runs: dict[bool, set[Any]] = {False: set(), True: set()}
    try:
        for training, dtype, shape in product(runs, (torch.float32, torch.float64, torch.bfloat16), SHAPES):
            x = torch.empty(shape, dtype=dtype, device="meta")
            with torch.device("meta"), _ScalingKernels(x) as kernels, drawn_from(0), torch.no_grad():
                module.train(training)(x)
            runs[training].add((*kernels.called, not training or kernels.drawn == shape[0]))
    except Exception:  # whatever the module raises
        return False
    finally:
        module.train(mode)
    scales = _held(module) == held and all(len(found) == 1 and found.pop()[-1] for found in runs.values())
    if scales and alike is not None:
        _SCALING.add(alike)
    return scales


_SCALING: set[tuple[Any, ...]] = set()  # a cache of `_only_scales`: classes of modules that scale, with attributes


def _held(module: nn.Module) -> dict[str, Any]:
    """Return the numbers and texts among a module's attributes, one of which may count its calls."""
    return {name: each for name, each in vars(module).items() if isinstance(each, int | float | str)}


class _ScalingKernels(TorchDispatchMode):
    """A mode that notes the kernels that a function of `x` calls. Raises ValueError for other kernels than scaling."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.called, self.drawn = list[Any](), 0  # kernels with their numbers; random numbers
        self._of_x, self._made = [x], list[torch.Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        of_x = [any(each is one for one in self._of_x) for each in args]
        if any(of_x) and name not in MAKES:
            if name not in SCALES or sum(of_x) > 1 or not (of_x[0] or name == "mul"):
                raise ValueError(f"computes {name} of the images")
            self._of_x.append(result)
        if func._schema.is_mutable and not any(args[0] is one for one in (*self._made, *self._of_x[1:])):
            raise ValueError(f"writes by {name}")
        self._made.append(result)
        self.drawn += result.numel() if torch.Tag.nondeterministic_seeded in func.tags else 0
        self.called.append((name, *(each for each in args if isinstance(each, int | float))))
        return result


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
