"""The planned memory of a training step against PyTorch's allocations: of networks, layers, and choices."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import pad

from benchmarks.planned_memory.peaks import allocated_peak, allocator_peak, walk_of
from tests.planning.allocated import measured, planned, usual_loss
from tiledseg.architecture.gated_scnn import GatedSCNN
from tiledseg.architecture.network import Network
from tiledseg.architecture.presets import KINDS
from tiledseg.architecture.residual_unet import ResidualUNet
from tiledseg.architecture.segnet import SegNet
from tiledseg.architecture.unet import UNet
from tiledseg.config.words import NORMS, UPSAMPLINGS
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.convolutions import Convolution, TransposedConvolution
from tiledseg.geometry.layers.joins import ImageAttention, ImageMax, ImageMean, ImageProducts, Multiply
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.layers.pixelwise import Sigmoid
from tiledseg.geometry.layers.resampling import AlignedUpsample, Border, PixelUnshuffle, Upsample
from tiledseg.geometry.memory_policy import named_policy
from tiledseg.geometry.shapes import is_legal_size
from tiledseg.models.frozen import freeze
from tiledseg.models.network import build_modules, build_network
from tiledseg.planning.walk.choice import StepChoices
from tiledseg.planning.walk.cost import tile_walk
from tiledseg.planning.walk.step_memory import training_memory
from tiledseg.training.choose_objective import choose_objective
from tiledseg.units import wide_bytes

SAME, VALID = (64, 96), (140, 156)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("padding", "norm", "upsampling"),
    [
        *((padding, *pair) for padding in ("same", "valid") for pair in zip(NORMS, cycle(UPSAMPLINGS), strict=False)),
        *(("same", "none", upsampling) for upsampling in UPSAMPLINGS),
    ],
)
def test_a_step_is_that_of_torch(padding: str, norm: str, upsampling: str, dtype: torch.dtype) -> None:
    """Kept: to the byte. The peak within 0.1 %; in float64 kernels unfold windows, which the meter does not see."""
    dropout = 0.3 if upsampling == "bilinear" else 0.0
    unet = UNet(4, base_channels=4, padding=padding, norm=norm, upsampling=upsampling, dropout=dropout)
    context = {"same": SAME, "valid": VALID}[padding]
    width = dtype.itemsize
    kept, peak = planned(unet.graph(), unet.bands, context, width)
    found = measured(build_modules(unet, seed=0).to(dtype), context)
    assert kept == found[0]
    assert peak >= 0.999 * found[1]
    assert width == 8 or peak <= 1.001 * found[1]
    costs = tile_walk(unet.graph(), unet.bands, context, width).costs
    values, pixels = math.prod(costs[-1].shape), math.prod(costs[-1].shape[1:])
    loss = (values + 1) * wide_bytes(width) + 8 * pixels  # log-probabilities, the sum of weights, labels
    assert kept == sum(cost.kept_bytes for cost in costs) + loss


@pytest.mark.parametrize("norm", ["none", "instance", "batch"])
def test_what_is_kept_under_bf16_autocast(norm: str) -> None:
    """To the byte, with the cast weights. Group and pixel norm are left out: autocast casts them on GPUs only."""
    unet = UNet(4, base_channels=4, norm=norm, classes=3)
    network = build_modules(unet, seed=0)
    found, _ = measured(network, SAME, autocast=True, loss_of=lambda x, y: usual_loss(x.float(), y))
    weights = [m.weight for m in network.modules() if hasattr(m, "kernel_size") and hasattr(m, "weight")]
    copies = sum(weight.nbytes // 2 for weight in weights)
    assert planned(unet.graph(), unet.bands, SAME, 2)[0] + copies == found


@pytest.mark.parametrize("norm", NORMS)
def test_peak_where_some_is_computed_once_more(norm: str) -> None:
    """Within 2 %; and it is less."""
    unet = UNet(4, base_channels=8, norm=norm, dropout=0.1)
    graph = unet.graph()
    policy = named_policy(graph, "all")
    (kept, peak), (all_kept, most) = (
        planned(each, unet.bands, SAME) for each in (replace(graph, memory=policy), graph)
    )
    assert peak == pytest.approx(measured(build_modules(unet, seed=0).follow(policy), SAME)[1], rel=0.02)
    assert kept < all_kept
    assert peak < most


FACTORS = {"encoder*": 0.0, "bottom*": 0.0}, {"encoder0*": 0.0}, {"encoder*": 0.0, "decoder*": 0.0}


@pytest.mark.parametrize(("norm", "factors"), [*zip((*NORMS, "batch"), cycle(FACTORS), strict=False)])
def test_a_frozen_part_keeps_nothing(norm: str, factors: dict[str, float]) -> None:
    """Within 1 %; where statistics stand still too."""
    unet = UNet(4, base_channels=4, norm=norm)
    network = freeze(build_modules(unet, seed=0), factors)
    memory, all_trained = (training_memory(graph, unet.bands, SAME) for graph in (network.graph, unet.graph()))
    assert memory.activations + memory.backward == pytest.approx(measured(network, SAME)[1], rel=0.01)
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert (memory.weights, memory.gradients, memory.optimizer) == (all_trained.weights, 8 * trained, 8 * trained)
    assert memory.total < all_trained.total
    if norm == "batch":
        still = network.hold_statistics()
        assert planned(still.graph, unet.bands, SAME)[1] == pytest.approx(measured(still, SAME)[1], rel=0.001)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    st.builds(
        UNet,
        levels=st.integers(1, 4),
        convs_per_level=st.integers(1, 3),
        kernel=st.sampled_from([1, 3]),
        base_channels=st.sampled_from([1, 2, 8, 16]),
        padding=st.sampled_from(["same", "valid"]),
        norm=st.sampled_from(NORMS),
        upsampling=st.sampled_from(UPSAMPLINGS),
        bands=st.integers(1, 5),
        classes=st.integers(2, 9),
    ),
    st.integers(0, 6),
    st.integers(0, 6),
)
def test_peak_of_any_network_on_any_context(unet: UNet, more_rows: int, more_cols: int) -> None:
    """Within 1 %, and 2 KiB for the smallest: rounding of buffers that only batch norm has."""
    layers = unet.graph()
    legal = [n for n in range(16, 300) if is_legal_size(layers, n)]
    context = legal[more_rows], legal[more_cols]
    found = measured(build_modules(unet, seed=0), context)[1]
    assert planned(layers, unet.bands, context)[1] == pytest.approx(found, rel=0.01, abs=2048)


def after_a_convolution(layer: Layer, out: int = 2, channels: int = 8) -> Graph:
    first = Convolution(channels, 3, padding=1)
    return Graph((Node("first", first), Node("it", layer), Node("last", Convolution(out, 1))))


def gated_by(layer: Layer) -> Graph:
    return Graph(
        (
            Node("first", Convolution(8, 3, padding=1)),
            Node("it", layer, ("first",) * layer.arity),
            Node("gate", Sigmoid()),
            Node("gated", Multiply(), ("first", "gate")),
            Node("last", Convolution(2, 1)),
        )
    )


def attending() -> Graph:
    """Attention of two heads at a fourth of the resolution, with keys and values half as long and wide."""
    nodes = (
        Node("first", Convolution(8, 4, 4)),
        Node("queries", Convolution(96, 1)),
        Node("smaller", Convolution(96, 2, 2), ("first",)),
        Node("attention", ImageAttention(2, 2), ("queries", "smaller", "smaller")),
        Node("last", TransposedConvolution(2, 4, True, 4)),
    )
    return Graph(nodes)


GRAPHS = {
    "corners aligned": after_a_convolution(AlignedUpsample()),
    "bicubic": after_a_convolution(Upsample("bicubic")),
    "reflected": after_a_convolution(Border(1, 1, 0.0, "reflect"), channels=64),
    "replicated": after_a_convolution(Border(1, 1, 0.0, "replicate"), channels=64),
    "blocks to channels": after_a_convolution(PixelUnshuffle(), 8),
    "maximum": gated_by(ImageMax()),
    "maximum, shared": gated_by(ImageMax(even=True)),
    "sum": gated_by(ImageMean(total=True)),
    "products": gated_by(ImageProducts(heads=8, out_channels=8)),
    "attention": attending(),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_single_layers_of_others(name: str) -> None:
    """Within 2 %: weights of places, and a few rows at a time, are not counted. A gradient that is not channels last is
    copied within the convolution's backward pass, where the meter does not see it: 11 % here."""
    graph = GRAPHS[name]
    found = measured(build_network(graph, 3, 0), (256, 256))[1]
    unseen = 0.12 if name in ("corners aligned", "bicubic", "blocks to channels") else 0.02
    assert 0.98 * found <= planned(graph, 3, (256, 256))[1] <= (1 + unseen) * found


EDGES = choose_objective(GatedSCNN(), "cross_entropy", 255)


def loss_of(output: Any, labels_BHW: torch.Tensor) -> torch.Tensor:
    if isinstance(output, tuple):
        return EDGES.sums(output, pad(labels_BHW, (EDGES.margin,) * 4, value=-1))[0]
    return usual_loss(output, labels_BHW)


@pytest.mark.parametrize(
    ("network", "tolerance", "side"),
    [
        (SegNet(3, 8, "batch", 4, 3), 0.001, 256),
        # Steps of single pixels in shortcuts keep a copy of those pixels.
        (ResidualUNet("resnet18", 16, "batch", bands=4), 0.02, 256),
        (ResidualUNet("resnet18", 16, "batch", bands=4), 0.01, 192),  # its peak is in a norm's backward pass
        (ResidualUNet("resnet50", 16, "none", "bilinear", 4), 0.02, 256),
        # What the loss of several outputs keeps is a measured multiple of them.
        (GatedSCNN("resnet18", 16, "batch", bands=4, classes=5), 0.02, 256),
        (GatedSCNN("wide38", 8, "none", False, bands=4, classes=3), 0.03, 256),
    ],
)
def test_networks_of_others(network: Network, tolerance: float, side: int) -> None:
    """With their losses."""
    found = measured(build_modules(network, seed=0), (side, side), loss_of=loss_of)[1]
    assert planned(network.graph(), 4, (side, side))[1] == pytest.approx(found, rel=tolerance)


CHANNELS, SIDE = 16, 64
CASES = {
    "3 x 3": (Convolution(8, 3, padding=1), nn.Conv2d(CHANNELS, 8, 3, padding=1)),
    "5 x 5": (Convolution(8, 5), nn.Conv2d(CHANNELS, 8, 5)),
    "step 2": (Convolution(8, 3, stride=2, padding=1), nn.Conv2d(CHANNELS, 8, 3, stride=2, padding=1)),
    "dilated": (Convolution(8, 3, padding=2, dilation=2), nn.Conv2d(CHANNELS, 8, 3, padding=2, dilation=2)),
    "up 2 x 2": (TransposedConvolution(8), nn.ConvTranspose2d(CHANNELS, 8, 2, stride=2)),
    "up 4 x 4": (
        TransposedConvolution(8, 4, stride=2, padding=1),
        nn.ConvTranspose2d(CHANNELS, 8, 4, stride=2, padding=1),
    ),
}


@pytest.mark.parametrize(("layer", "module"), CASES.values(), ids=CASES)
def test_float64_unfolds_what_is_counted(layer: Convolution | TransposedConvolution, module: nn.Module) -> None:
    """Within 1 %; other precisions nothing."""
    x_BCHW = torch.randn(1, CHANNELS, SIDE, SIDE, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    module = module.double().to(memory_format=torch.channels_last)
    with torch.no_grad():
        y_BCHW = module(x_BCHW)
        found = allocator_peak(lambda: module(x_BCHW)) - y_BCHW.nbytes
    shape = tuple(y_BCHW.shape[1:])
    work = layer.counts(CHANNELS).work * shape[1] * shape[2]
    unfolded = {width: layer.memory([x_BCHW.nbytes], shape, width, work).unfolded for width in (8, 4, 2)}
    assert unfolded == {8: pytest.approx(found, rel=0.01), 4: 0, 2: 0}


@pytest.mark.parametrize(
    "network",
    [
        UNet(4, base_channels=8),
        UNet(3, base_channels=8, norm="instance", upsampling="bilinear"),
        UNet(3, base_channels=8, norm="group", dropout=0.2),
        UNet(3, base_channels=8, norm="pixel", upsampling="nearest"),
        UNet(3, base_channels=8, norm="batch", padding="same", convs_per_level=1),
        KINDS["segnet"](),
    ],
    ids=["none", "instance", "group", "pixel", "batch", "segnet"],
)
@pytest.mark.parametrize("share", [0.9, 0.55])
def test_the_peak_of_a_choice_is_that_of_a_real_step(network: Network, share: float) -> None:
    """Within 2 %, and never above the budget by more than that."""
    found = walk_of(network)
    step = StepChoices(found)
    chosen = step.choose(int(share * step.kept))
    assert chosen is not None
    assert step.peak(chosen.policy) == chosen.peak <= share * step.kept
    assert allocated_peak(network, chosen.policy) == pytest.approx(chosen.peak, rel=0.02)
