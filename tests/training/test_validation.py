"""What a validation counts and keeps, against the undivided network, torchmetrics and a hand count."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.law.cases import IGNORED, ArrayReader, Case, as_batch, one_rank
from tiledseg.architecture.unet import UNet
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.scores import BINS, calibration_error
from tiledseg.geometry.box import Box, Interval
from tiledseg.planning.run.spread import Spread
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.samples.dataset import Dataset
from tiledseg.raster.statistics import Normalization
from tiledseg.training.validation import SIDE, Findings, PanelView, choose_views, validate

CASE = Case(UNet(2, 1, 3, 4, bands=2, classes=3), (3, 2))
COUNT = 2


@pytest.fixture(scope="module")
def data() -> Dataset:
    """Two images of noise; some labels do not count."""
    draw = np.random.default_rng(5)
    shape = CASE.raster
    labels = draw.integers(0, 3, (COUNT, 1, *shape)).astype(np.uint8)
    labels[:, :, 2:5, 3:9] = IGNORED
    return Dataset(
        [ArrayReader(draw.normal(size=(2, *shape))) for _ in range(COUNT)],
        [ArrayReader(label) for label in labels],
        [CASE.tiling()] * COUNT,
        LabelMap.from_config(3, IGNORED),
        Normalization.identity(2),
        "float64",
    )


@pytest.fixture(scope="module")
def whole(data: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities (2, 3, H, W) of the undivided network, and labels (2, H, W)."""
    network = CASE.network().eval()
    undivided = replace(data, tilings=[CASE.tiling((1, 1))] * COUNT)
    with torch.no_grad():
        contexts = [undivided.load(number, 0) for number in range(COUNT)]
        rows, cols = contexts[0].tile.core_in_output.slices
        found = [network(as_batch(sample.x_CHW))[:, :, rows, cols].softmax(1) for sample in contexts]
    return torch.cat(found), torch.from_numpy(np.concatenate([reader._pixels_CHW for reader in data.labels]))


@pytest.fixture
def findings(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> Findings:
    monkeypatch.setattr("tiledseg.training.validation.SIDE", 6)
    views = choose_views([CASE.raster] * COUNT, 4, 0)
    run = ParallelRun(Spread(), CASE.network(), one_rank(), "fp64")
    passes = run.over(data.tilings)
    return validate(run.network, data, one_rank(), passes, 1, views)


def test_counts_are_those_of_the_undivided_network(
    findings: Findings, whole: tuple[torch.Tensor, torch.Tensor]
) -> None:
    from torchmetrics.functional.classification import multiclass_calibration_error, multiclass_confusion_matrix

    probabilities, labels = whole
    matrix = multiclass_confusion_matrix(probabilities, labels.long(), 3, ignore_index=IGNORED)
    assert findings.matrix_KK.tolist() == matrix.tolist()
    error = multiclass_calibration_error(probabilities, labels.long(), 3, BINS, ignore_index=IGNORED)
    assert calibration_error(findings.reliability) == pytest.approx(float(error), abs=1e-6)
    confidence = probabilities.amax(1)[labels != IGNORED].numpy()
    assert findings.reliability[0].sum(0).tolist() == np.histogram(confidence, BINS, (0, 1))[0].tolist()


def test_views_show_the_pixels_of_the_undivided_network(
    findings: Findings, whole: tuple[torch.Tensor, torch.Tensor], data: Dataset
) -> None:
    probabilities, labels = whole
    assert len(findings.views) == 4
    for seen in findings.views:
        image, step = seen.view.image, seen.view.stride
        rows, cols = (slice(side.start, side.stop, step) for side in (seen.view.box.row, seen.view.box.col))
        assert (seen.map_HW == probabilities.argmax(1)[image, rows, cols].numpy()).all()
        assert (seen.labels_HW == labels[image, rows, cols].numpy()).all()
        pixels_CHW = data.images[image]._pixels_CHW[:, rows, cols].astype(np.float32)
        assert (seen.image_CHW == pixels_CHW).all()


SHAPES = [(1000, 700), (300, 200), (5000, 5000)]


def test_views_are_drawn_by_the_seed_alone() -> None:
    views = choose_views(SHAPES, 7, 3)
    assert views == choose_views(SHAPES, 7, 3)
    assert views[:4] == choose_views(SHAPES, 4, 3), "one more shows the others too"
    assert views != choose_views(SHAPES, 7, 4)
    assert views[0] == PanelView(0, Box.of_shape((1000, 700)), 4)
    assert {view.image for view in views} == {0, 1, 2}
    for view in views:
        assert Box.of_shape(SHAPES[view.image]).contains(view.box)
        assert max(view.shape) <= SIDE
        assert view.stride == 1 or view == views[0]


def test_views_lie_in_the_blocks_that_are_validated_on() -> None:
    """Pictures of other pixels would have empty labels. A small block is shown with what lies around it."""
    large, small = Box(Interval(100, 800), Interval(0, 400)), Box(Interval(250, 300), Interval(150, 200))
    views = choose_views(SHAPES, 9, 3, [[large], [small], []])[1:]
    assert {view.image for view in views} == {0, 1}
    for view in views:
        assert view.shape == (256, min(256, SHAPES[view.image][1]))
        assert large.contains(view.box) if view.image == 0 else view.box.contains(small)
