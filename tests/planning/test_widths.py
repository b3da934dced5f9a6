"""One width a value, asked of one place: `plan` and `train` choose alike, and torch's tensors are as wide."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.planning.asked import asked_of
from tests.small_files import write_raster
from tiledseg.architecture.presets import build_network
from tiledseg.architecture.unet import UNet
from tiledseg.config.run import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from tiledseg.config.words import NORMS
from tiledseg.execution.carrying import INPUT_DTYPES, PARAMETER_DTYPES, autocast
from tiledseg.models.network import build_modules
from tiledseg.planning.answer.report import plan_tiling
from tiledseg.training.preparation import prepare
from tiledseg.units import ACTIVATION_BYTES, SINGLE_NORMS, copy_bytes, norm_bytes, wide_bytes

MODEL = ModelConfig(levels=3, base_channels=8)
MEMORY = 5 << 20


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    root = tmp_path_factory.mktemp("widths")
    write_raster(root / "image.tif", np.zeros((3, 150, 230), np.uint8))
    write_raster(root / "labels.tif", np.zeros((1, 150, 230), np.uint8))
    return DataConfig(str(root / "image.tif"), str(root / "labels.tif"), classes=2)


def memory_for(precision: str) -> int:
    """Enough for a small tile, and too little for all: kernels of float64 unfold their inputs."""
    return (3 if precision == "fp64" else 1) * MEMORY


@pytest.mark.parametrize("ranks", [1, 7])
@pytest.mark.parametrize("precision", ACTIVATION_BYTES)
def test_plan_and_train_choose_the_same_grid(data: DataConfig, precision: str, ranks: int) -> None:
    """The halved bytes of bf16 did count for one of them only. A norm over the image left `train` one tile."""
    memory = memory_for(precision)
    for norm, halo in (("none", "read"), ("instance", "layer")):
        model = replace(MODEL, norm=norm)
        question = asked_of((150, 230), build_network(model, 3, 2), precision=precision, memory=memory, gpus=ranks)
        config = Config(
            data=data,
            model=model,
            train=TrainConfig(precision=precision),
            parallel=ParallelConfig(halo=halo, idle_ranks=ranks > 1 and halo == "layer"),
        )
        prepared = prepare(config, memory, ranks)
        assert plan_tiling(question).grid == prepared.training.tilings[0].grid
        assert len(plan_tiling(question)) > 1
        assert prepared.plan.micro_batch.value_bytes == ACTIVATION_BYTES[precision]


@pytest.mark.parametrize(
    ("precision", "norm"),
    [*zip(ACTIVATION_BYTES, NORMS, strict=False), *zip(reversed(ACTIVATION_BYTES), NORMS, strict=False)],
)
def test_torchs_tensors_are_as_wide(precision: str, norm: str) -> None:
    """Weights, their gradients and copies, the input, each layer's output, the loss: of a real step of the U-Net.

    The norms that autocast computes in float32 on GPUs it does not on a CPU: there they are as wide as the rest.
    """
    width, wide = ACTIVATION_BYTES[precision], wide_bytes(ACTIVATION_BYTES[precision])
    unet = UNet(3, base_channels=8, norm=norm)
    network = build_modules(unet, seed=0).to(PARAMETER_DTYPES[precision]).train()
    outputs: dict[str, set[int]] = defaultdict(set)
    for module in network.layers.values():
        module.register_forward_hook(lambda m, _, y: outputs[type(m).__name__].add(y.element_size()))
    source = torch.from_numpy(np.ones((1, 4, 32, 32), INPUT_DTYPES[precision]))
    saved: set[tuple[tuple[int, ...], int]] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.add((tuple(tensor.shape), tensor.element_size()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), autocast(precision, torch.device("cpu")):
        logits = network(source)
    loss = cross_entropy(logits.to(source.dtype), torch.zeros(1, 32, 32, dtype=torch.long))
    loss.backward()
    assert source.element_size() == loss.element_size() == wide
    parameters = list(network.parameters())
    assert {t.element_size() for p in parameters for t in (p, p.grad)} == {wide}
    kinds = ("SteadyConvolution", "ConvTranspose2d", "LeakyReLU", "MaxPool2d", "Concatenate")
    assert {size for kind in kinds for size in outputs[kind]} == {width}
    kernels = {size for shape, size in saved if shape == tuple(network.layers["encoder0-conv1"].weight.shape)}
    assert kernels == {copy_bytes(width) or wide}
    assert norm_bytes(norm, width) == (wide if norm in SINGLE_NORMS else width)
