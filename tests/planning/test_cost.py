"""Counted costs against those of real networks: parameters, shapes, multiply-adds, and what autograd keeps."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.planning.flops import flop_counter
from tiledseg.architecture.network import NORMS, UPSAMPLINGS
from tiledseg.architecture.presets import PRESETS, build_network
from tiledseg.architecture.unet import UNet
from tiledseg.config.run import ModelConfig
from tiledseg.errors import GeometryError
from tiledseg.models.frozen import freeze
from tiledseg.models.network import build_modules
from tiledseg.planning.step.cost import backward_passes, layer_costs, loss_bytes

CONTEXTS = {"same": (48, 64), "valid": (92, 100)}


def kept_by_autograd(unet: UNet, context: tuple[int, int], dtype: torch.dtype, autocast: bool) -> tuple[int, int]:
    """Bytes that the network keeps, and those that its loss keeps on top; a storage counts once, weights do not."""
    network = build_modules(unet, seed=0).to(dtype).to(memory_format=torch.channels_last).train()  # as runs have it
    parameters = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept.setdefault(storage.data_ptr(), storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = network(torch.randn(1, unet.bands, *context, dtype=dtype).to(memory_format=torch.channels_last))
        of_network = sum(s.nbytes() for s in kept.values())
        labels = torch.zeros(1, *logits.shape[2:], dtype=torch.long)
        loss = cross_entropy(logits.float() if autocast else logits, labels, reduction="sum", ignore_index=255)
    of_loss = sum(s.nbytes() for s in kept.values()) - of_network
    del loss
    return of_network, of_loss


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("upsampling", UPSAMPLINGS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_kept_bytes_are_those_of_autograd(padding: str, norm: str, upsampling: str, dropout: float) -> None:
    """To the byte, in float32 and float64."""
    unet = UNet(4, base_channels=4, padding=padding, norm=norm, upsampling=upsampling, dropout=dropout, classes=3)
    for dtype, width in ((torch.float32, 4), (torch.float64, 8)):
        costs = layer_costs(unet.graph(), unet.bands, CONTEXTS[padding], width)
        counted = sum(c.kept_bytes for c in costs), loss_bytes([costs[-1]], width)
        assert counted == kept_by_autograd(unet, CONTEXTS[padding], dtype, autocast=False)


@pytest.mark.parametrize("norm", ["none", "instance", "batch"])
def test_kept_bytes_under_bf16_autocast(norm: str) -> None:
    """To the byte, with the cast weights. Group and pixel norm are left out: autocast casts them on GPUs only."""
    unet = UNet(4, base_channels=4, norm=norm, classes=3)
    costs = layer_costs(unet.graph(), unet.bands, CONTEXTS["same"], 2)
    weights = sum(
        m.weight.numel() for m in build_modules(unet).modules() if hasattr(m, "kernel_size") and hasattr(m, "weight")
    )
    found, _ = kept_by_autograd(unet, CONTEXTS["same"], torch.float32, autocast=True)
    assert sum(c.kept_bytes for c in costs) + 2 * weights == found


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_parameters_and_shapes_are_those_of_the_network(padding: str, norm: str) -> None:
    unet = UNet(4, 3, 3, 4, padding, norm, bands=5, classes=3)
    context = (64, 80) if padding == "same" else (154, 162)
    network = build_modules(unet, seed=0)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in network.layers.items():
        module.register_forward_hook(
            lambda module, inputs, output, name=name: shapes.__setitem__(name, tuple(output.shape[1:]))
        )
    network(torch.zeros(1, 5, *context))
    costs = layer_costs(unet.graph(), 5, context)
    assert [c.shape for c in costs] == list(shapes.values())
    counts = [sum(p.numel() for p in module.parameters()) for module in network.layers.values()]
    assert [c.parameters for c in costs] == counts


@pytest.mark.parametrize("upsampling", UPSAMPLINGS)
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_multiply_adds_are_half_of_torchs_flops(padding: str, upsampling: str) -> None:
    unet = UNet(3, 2, 3, 4, padding, upsampling=upsampling)
    network = build_modules(unet, seed=0)
    with flop_counter() as counter:  # with gradients: without, an activation goes into its convolution, uncounted
        network(torch.zeros(1, 4, 52, 60))
    costs = layer_costs(unet.graph(), 4, (52, 60))
    assert 2 * sum(c.multiply_adds for c in costs) == counter.get_total_flops()


def test_a_frozen_part_has_no_backward_pass() -> None:
    """Against torch's count, which makes no gradient of the network's input."""
    unet = UNet(3, 2, 3, 4, norm="group")
    for factors in ({"encoder*": 0}, {"encoder*": 0, "decoder*": 0}):
        network = freeze(build_modules(unet, seed=0), factors)
        with flop_counter() as counter:
            network(torch.zeros(1, 4, 64, 64)).sum().backward()
        costs = layer_costs(network.graph, 4, (64, 64))
        work = sum(c.multiply_adds * (1 + backward_passes(network.graph, k)) for k, c in enumerate(costs))
        assert 2 * work == counter.get_total_flops()


def test_an_illegal_context_is_refused() -> None:
    with pytest.raises(GeometryError, match="1434 is not legal"):
        layer_costs(UNet().graph(), 4, (1440, 1434))


def stage_shares(work: list[int], balance: tuple[int, ...]) -> list[float]:
    """Share of the work on each stage of a balance list."""
    ends = list(itertools.accumulate(balance))
    assert ends[-1] == len(work)
    return [sum(work[end - size : end]) / sum(work) for end, size in zip(ends, balance, strict=True)]


@pytest.mark.parametrize("name", list(PRESETS))
def test_the_papers_balance_lists_leave_one_stage_with_a_quarter_to_a_third(name: str) -> None:
    unet = build_network(ModelConfig(name=name), bands=4, classes=2)
    work = [c.multiply_adds for c in layer_costs(unet.graph(), 4, (1024, 1024))]
    largest = max(stage_shares(work, PRESETS[name].balance))
    assert 0.26 <= largest <= 0.325
    assert 3.1 <= 1 / largest <= 3.75, "the cap on 6 stages before any bubble"
