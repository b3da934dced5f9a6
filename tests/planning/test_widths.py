"""One width a value, asked of one place: `plan` and `train` choose alike, and torch's tensors are as wide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.planning.asked import asked_of
from tests.small_files import write_raster
from tiledseg.architecture.presets import build_network
from tiledseg.config.run import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from tiledseg.planning.answer.report import plan_tiling
from tiledseg.training.preparation import Preparation
from tiledseg.units import ACTIVATION_BYTES

MODEL = ModelConfig(levels=3, base_channels=8)
MEMORY = 5 << 20  # enough for a small tile, and too little for all


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    root = tmp_path_factory.mktemp("widths")
    write_raster(root / "image.tif", np.zeros((3, 150, 230), np.uint8))
    write_raster(root / "labels.tif", np.zeros((1, 150, 230), np.uint8))
    return DataConfig(str(root / "image.tif"), str(root / "labels.tif"), classes=2)


@pytest.mark.parametrize("ranks", [1, 7])
@pytest.mark.parametrize("precision", ACTIVATION_BYTES)
def test_plan_and_train_choose_the_same_grid(data: DataConfig, precision: str, ranks: int) -> None:
    """The halved bytes of bf16 did count for one of them only. A norm over the image left `train` one tile."""
    memory = MEMORY * (3 if precision == "fp64" else 1)  # kernels of float64 unfold their inputs
    for norm, halo in (("none", "read"), ("instance", "layer")):
        model = replace(MODEL, norm=norm)
        question = asked_of((150, 230), build_network(model, 3, 2), precision=precision, memory=memory, gpus=ranks)
        config = Config(
            data=data,
            model=model,
            train=TrainConfig(precision=precision),
            parallel=ParallelConfig(halo=halo, idle_ranks=ranks > 1 and halo == "layer"),
        )
        prepared = Preparation(config, memory, ranks)
        assert plan_tiling(question).grid == prepared.training.tilings[0].grid
        assert len(plan_tiling(question)) > 1
        assert prepared.question.value_bytes == ACTIVATION_BYTES[precision]
