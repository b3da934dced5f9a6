"""Runs each function that tracing takes on the GPU in deterministic mode. A line for each says that it trains, that its
values or gradients are not those of the CPU, or why it is refused."""

import functools
from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import nn
from torch.nn import functional

from tests.conftest import NIGHTLY
from tiledseg.comm.session import leave
from tiledseg.errors import ConfigError, GeometryError, InputError
from tiledseg.execution.carrying import make_deterministic, naming_disorder
from tiledseg.models.layers.pixelwise import resolve
from tiledseg.tracing.calls import ALONG_CHANNELS, ELEMENTWISE
from tiledseg.tracing.trace import trace

Function = Callable[[torch.Tensor], torch.Tensor]
SIZE = 48


class Between(nn.Module):
    """A function between two convolutions."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.before = nn.Conv2d(2, 4, 3, padding=1)
        channels = function(torch.rand(1, 4, SIZE, SIZE)).shape[1]
        self.after = nn.Conv2d(channels, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.function(self.before(x).sigmoid()))


class Computed(nn.Module):
    """A convolution whose weights a function computes."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(4, 2, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(x, self.function(self.weight), padding=1)


def resized(mode: str, align: bool | None, factors: tuple[float, float]) -> Function:
    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.interpolate(x, scale_factor=factors, mode=mode, align_corners=align)

    return function


def pyramid(bins: int) -> Function:
    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.interpolate(functional.adaptive_avg_pool2d(x, bins), x.shape[2:], mode="bilinear")

    return function


def of_names() -> Iterator[tuple[str, Function]]:
    """Each function of the tables of names, a fourth of them by day, with the first arguments that torch takes."""
    for name in sorted(ELEMENTWISE | ALONG_CHANNELS)[:: 1 if NIGHTLY else 4]:
        channels = (1,), ([1],)
        others = (), (1,), (0.5,), (torch.full((4, 1, 1), 0.4),), (0.2, 0.7)
        for arguments in channels if name in ALONG_CHANNELS else others:
            function = functools.partial(lambda x, call, rest: call(x, *rest), call=resolve(name), rest=arguments)
            try:
                made = function(torch.rand(1, 4, SIZE, SIZE))
            except (TypeError, RuntimeError, ValueError):
                continue
            if isinstance(made, tuple):
                function, made = functools.partial(lambda x, all_of: all_of(x)[0], all_of=function), made[0]
            if made.shape[2:] != (SIZE, SIZE):
                continue
            yield name, function
            break


def cases() -> Iterator[tuple[str, nn.Module]]:
    for name, function in of_names():
        yield name, Between(lambda x, function=function: function(x) * x.mean(1, keepdim=True))
    modes = ("nearest", None), ("nearest-exact", None), ("bilinear", False), ("bilinear", True), ("bicubic", False)
    for (mode, align), factors in product(modes, ((2.0, 2.0), (3.0, 2.0), (1.0, 4.0))):
        yield f"{mode} {align} {factors}", Between(resized(mode, align, factors))
    for mode in ("nearest", "area", "bilinear"):
        yield f"{mode} smaller", Between(resized(mode, None, (0.5, 0.5)))
    for mode in ("zeros", "reflect", "replicate"):
        yield f"convolution {mode}", Between(nn.Conv2d(4, 4, 5, padding=2, padding_mode=mode))
    for name in ("mean", "amax", "sum"):
        yield f"image's {name}", Between(lambda x, name=name: x * getattr(x, name)((2, 3), keepdim=True))
        yield f"channels' {name}", Between(lambda x, name=name: getattr(x, name)(1, keepdim=True))
    for bins in (1, 2, 3):
        yield f"pyramid {bins}", Between(pyramid(bins))
    inside = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
    for pool in (nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), inside, nn.AvgPool2d(2)):
        yield str(pool), Between(pool)
    norms = nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.PReLU(4), nn.ChannelShuffle(2)
    for module in (*norms, nn.ConvTranspose2d(4, 4, 4, 2, 1), nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=4)):
        yield type(module).__name__, Between(module)
    yield "local_response_norm", Between(nn.LocalResponseNorm(3))
    yield "sorted channels", Between(lambda x: x.sort(1)[0])
    yield "largest channel", Between(lambda x: x.max(1, keepdim=True)[0])
    each = {"dim": (1, 2, 3), "keepdim": True}
    yield "weights' standard", Computed(lambda w: (w - w.mean(**each)) / w.std(**each))
    yield "weights' cumsum", Computed(lambda w: w.cumsum(1))
    yield "weights' bicubic", Computed(lambda w: functional.interpolate(w, (3, 3), mode="bicubic"))
    yield "weights' reflection", Computed(lambda w: functional.pad(w[:, :, :2, :2], (1, 0, 1, 0), mode="reflect"))


def gradients(network: nn.Module, device: str) -> torch.Tensor:
    """Of a loss that weighs each output otherwise, with the outputs."""
    draw = torch.Generator().manual_seed(0)
    network.to(device).zero_grad()
    x = torch.randn(1, 2, SIZE, SIZE, generator=draw).to(device).contiguous(memory_format=torch.channels_last)
    y = network(x)
    (y * torch.randn(y.shape, generator=draw).to(device)).sum().backward()
    found = [y, *(parameter.grad for parameter in network.parameters() if parameter.grad is not None)]
    return torch.cat([tensor.detach().flatten().cpu() for tensor in found])


def end_of(module: nn.Module) -> str:
    make_deterministic(False)
    try:
        network = trace(module.train(), 2)
    except (InputError, GeometryError, RuntimeError):  # or torch knows no derivative
        return "not traced"
    make_deterministic(True)
    try:
        expected = gradients(network, "cpu")
    except RuntimeError:
        return "has no gradient"
    try:
        with naming_disorder():
            found = gradients(network, "cuda")
    except ConfigError as error:
        return f"refused: {error}"
    apart = (found - expected).norm() / expected.norm()
    # An H100's kernels of 5 x 5 in float32 (cuDNN 9.19) are 7e-4 apart.
    large = any(isinstance(each, nn.Conv2d) and max(each.kernel_size) > 3 for each in module.modules())
    return "trains" if apart < (2e-3 if large else 1e-4) else f"is {apart:.1e} apart"


for name, module in cases():
    print(f"{name}: {end_of(module)}")
# As commands end: torch's backward thread may still free the last pass, and would abort the interpreter's shutdown.
leave(0)
