"""Functions of time series, one by one: exact, or refused in words. `test_foreign` holds `TemporalUNet` to the law."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.law.cases import relative
from tiledseg.architecture.network import ForeignNetwork
from tiledseg.errors import ConfigError
from tiledseg.geometry.shapes import count_parameters
from tiledseg.models.layers.times import TimeSeries
from tiledseg.tracing.trace import trace

TIMES, BANDS = 3, 4
Function = Callable[[torch.Tensor], torch.Tensor]


class Layered(nn.Module):
    """A module of `layers`, and a `function` of their output, with a mean over times last."""

    def __init__(self, function: Function, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.function = nn.Sequential(*layers), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.function(self.layers(x))
        return y.mean(2) if y.dim() == 5 else y


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def folded(layer: nn.Module, first: bool) -> nn.Module:
    """A layer of images, for each time: times come before the images of the batch, or after them."""
    dims, back = ((0, 2, 1, 3, 4), (0, 2, 1, 3, 4)) if first else ((2, 0, 1, 3, 4), (1, 2, 0, 3, 4))

    def function(x: torch.Tensor) -> torch.Tensor:
        images = x.permute(dims)
        return made.each(images.flatten(0, 1)).unflatten(0, images.shape[:2]).permute(back)

    made = Layered(function)
    made.each = layer
    return made


def resized(**how: object) -> nn.Module:
    return Layered(lambda x: functional.interpolate(x, **how))  # type: ignore[arg-type]


CASES: dict[str, Callable[[], nn.Module]] = {
    "strides over all dims": lambda: Layered(same, nn.Conv3d(4, 6, (3, 5, 2), (2, 2, 2), (1, 2, 0), groups=2)),
    "mirrored": lambda: Layered(same, nn.Conv3d(4, 3, 3, padding=(0, 1, 1), padding_mode="replicate")),
    "transposed": lambda: Layered(same, nn.ConvTranspose3d(4, 3, (3, 4, 2), (2, 2, 2), (1, 1, 0), (1, 0, 0))),
    "batch norm": lambda: Layered(same, nn.Conv3d(4, 5, 1), nn.BatchNorm3d(5), nn.PReLU(5)),
    "without weights": lambda: Layered(same, nn.InstanceNorm3d(4), nn.GroupNorm(2, 4, affine=False)),
    "images of a time": lambda: folded(nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1), nn.GroupNorm(3, 6)), True),
    "times of an image": lambda: folded(nn.Sequential(nn.ConvTranspose2d(4, 6, 2, 2), nn.InstanceNorm2d(6)), False),
    "pooled images": lambda: folded(nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.MaxPool2d(2)), True),
    "maxima": lambda: Layered(same, nn.MaxPool3d((2, 3, 3), (1, 2, 2), (1, 1, 1), (2, 1, 1))),
    "means": lambda: Layered(same, nn.AvgPool3d(3, (1, 2, 2), 1, count_include_pad=False)),
    "divided": lambda: Layered(same, nn.AvgPool3d(2, (1, 2, 2), divisor_override=5)),
    "one time is left": lambda: Layered(lambda x: functional.adaptive_avg_pool3d(x, (1, *x.shape[3:]))),
    "a mean of all": lambda: Layered(lambda x: x * nn.functional.adaptive_avg_pool3d(x, 1)),
    "a maximum of all": lambda: Layered(lambda x: x * x.amax((2, 3, 4), keepdim=True)),
    "more times": lambda: resized(scale_factor=2, mode="trilinear", align_corners=False),
    "fewer times": lambda: resized(scale_factor=(1 / 3, 1, 1), mode="nearest"),
    "corners": lambda: resized(scale_factor=(1, 2, 2), mode="trilinear", align_corners=True),
    "padded": lambda: Layered(lambda x: functional.pad(x, (1, 2, 0, 1, 2, 0), value=0.5)),
    "reversed": lambda: Layered(lambda x: torch.cat([x.flip(2)[:, :, :2], x[:, :, 1:]], 2)),
    "less the mean of all times": lambda: Layered(lambda x: x - x.mean(2, keepdim=True)),
    "by the mean of all channels": lambda: Layered(lambda x: x.mean(1, keepdim=True) * x),
    "every second time": lambda: Layered(lambda x: x[:, ::3, ::2] - x[:, ::3, 1:]),
    "padded channels": lambda: Layered(lambda x: functional.pad(x, (0, 0, 0, 0, 0, 0, 1, 2), value=2.0)),
    "a series of one channel": lambda: Layered(same, nn.Conv3d(4, 1, 3, padding=1), nn.Conv3d(1, 2, (3, 1, 1))),
}


@pytest.mark.parametrize("name", CASES)
def test_a_function_of_time_series(name: str) -> None:
    torch.manual_seed(0)
    module = CASES[name]().double().eval()
    whole = TimeSeries(module, TIMES)
    network = trace(whole, TIMES * BANDS)
    x_BCHW = torch.randn(2, TIMES * BANDS, 64, 96, dtype=torch.float64)
    assert relative(network(x_BCHW), module(x_BCHW.unflatten(1, (TIMES, BANDS)).transpose(1, 2))) < 1e-12
    assert list(network.state_dict()) == list(module.state_dict())
    assert count_parameters(network.graph, network.bands) == sum(weight.numel() for weight in module.parameters())


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda: Layered(same, nn.Dropout3d(0.5)), "use Dropout2d, or Dropout for times"),
        (
            lambda: resized(scale_factor=(1, 1.5, 1.5), mode="trilinear"),
            "only whole factors fall on the edges of tiles",
        ),
        (lambda: Layered(same, nn.Conv3d(4, 4, 3, padding=1, padding_mode="circular")), "with the image's other end"),
        (lambda: folded(nn.PixelShuffle(2), True), "moves channels of several times at once"),
        (lambda: Layered(lambda x: x.softmax(3)), "works along pixels"),
        (lambda: Layered(same, nn.LSTM(4, 4)), "does not run"),
    ],
)
def test_what_no_tile_keeps_is_refused(module: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trace(TimeSeries(module(), TIMES), TIMES * BANDS)


def test_bands_of_no_whole_number_of_times_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.series is 3, but an image has 10 bands, no multiple of it"):
        ForeignNetwork.of("a:b", {}, 10, 2, None, 3)


def test_float32_bits_of_a_pixel_do_not_depend_on_the_tile() -> None:
    """Convolutions of each time take the steady kernel of `convolve`: torch's own adds otherwise in small tiles."""
    torch.manual_seed(0)
    layers = (
        nn.Conv3d(4, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv3d(6, 6, (1, 3, 3), padding=(0, 1, 1)),
        nn.MaxPool3d((1, 2, 2)),
    )
    module = Layered(same, *layers, nn.ConvTranspose3d(6, 3, (1, 2, 2), (1, 2, 2)))
    network = trace(TimeSeries(module, TIMES), TIMES * BANDS).eval()
    x_BCHW = torch.randn(1, TIMES * BANDS, 96, 128).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        whole = network(x_BCHW)
        for size in (4, 8, 16, 40):
            part = x_BCHW[:, :, 12 : 20 + size, 28 : 40 + size].contiguous(memory_format=torch.channels_last)
            tile = network(part)[:, :, 4 : 4 + size, 4 : 4 + size]
            assert torch.equal(tile, whole[:, :, 16 : 16 + size, 32 : 32 + size])
