from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch.nn import functional

import tiledseg
from tests.crash.runs import Material
from tiledseg.architecture.gated_scnn import GRADIENTS, GatedSCNN
from tiledseg.architecture.unet import UNet
from tiledseg.config.run import TrainConfig
from tiledseg.errors import ConfigError
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.training.choose_objective import choose_objective, given_weights, weighted
from tiledseg.training.objective import EdgesTerm, Objective, PixelTerm, cross_entropies, edges_of, signed_distances


def test_a_tile_without_a_valid_pixel_is_zero_with_zero_gradient() -> None:
    logits = torch.randn(1, 3, 3, 4, dtype=torch.float64, requires_grad=True)
    loss, weight = PixelTerm(255).sums((logits,), torch.full((1, 3, 4), 255, dtype=torch.uint8))
    loss.backward()
    assert (loss.item(), weight.item()) == (0.0, 0.0)
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("classes", [2, 5, 9])
def test_a_pixels_loss_has_the_same_bits_in_any_tile(classes: int, dtype: torch.dtype, smoothing: float) -> None:
    """And its gradient: no kernel takes what is left of a vector of pixels by itself."""
    generator = torch.Generator().manual_seed(classes)
    logits = 5 * torch.randn(1, classes, 64, 48, generator=generator, dtype=dtype)
    target = torch.randint(0, classes, (1, 64, 48), generator=generator, dtype=torch.uint8)
    target[:, 30] = 255
    weights = tuple(1 + k / 3 for k in range(classes))

    def one(rows: slice, cols: slice, layout: torch.memory_format) -> tuple[torch.Tensor, torch.Tensor]:
        tile, labels = logits[:, :, rows, cols].contiguous(memory_format=layout).requires_grad_(), target[:, rows, cols]
        losses = cross_entropies(tile, labels, 255, weights, smoothing)
        assert len(losses) == labels.numel()
        return losses.detach().view(labels.shape), torch.autograd.grad(losses.sum(), tile)[0]

    whole, gradient = one(slice(None), slice(None), torch.channels_last)
    exact = functional.cross_entropy(
        logits, target.long(), logits.new_tensor(weights), ignore_index=255, reduction="none", label_smoothing=smoothing
    )
    rounding = 1e-5 if dtype == torch.float32 else 1e-13
    assert whole.numpy() == pytest.approx(exact.numpy(), rel=rounding, abs=rounding)
    for rows, cols in ((slice(3, 34), slice(5, 38)), (slice(29, 32), slice(0, 5)), (slice(7, 8), slice(9, 10))):
        for layout in (torch.channels_last, torch.contiguous_format):
            losses, slopes = one(rows, cols, layout)
            assert torch.equal(losses, whole[:, rows, cols])
            assert torch.equal(slopes, gradient[:, :, rows, cols])


K, IGNORED, SHAPE = 3, 255, (41, 37)


def labels_HW() -> NDArray[np.uint8]:
    draw = np.random.default_rng(4)
    found_HW = np.kron(draw.integers(0, K, (9, 8)), np.ones((5, 5)))[: SHAPE[0], : SHAPE[1]].astype(np.uint8)
    found_HW[draw.random(SHAPE) < 0.02] = IGNORED
    return found_HW


def outputs(seed: int) -> tuple[torch.Tensor, ...]:
    """Scores, edges, and gradients of the scores' probabilities, of the whole raster."""
    generator = torch.Generator().manual_seed(seed)
    scores_BKHW, edges_BCHW = (
        3 * torch.randn(1, count, *SHAPE, generator=generator, dtype=torch.float64) for count in (K, 1)
    )
    filters = torch.tensor(GRADIENTS, dtype=torch.float64)[:, None].repeat(K, 1, 1, 1)
    gradients_BCHW = torch.nn.functional.conv2d(scores_BKHW.softmax(1), filters, padding=3, groups=K)
    return scores_BKHW, edges_BCHW, gradients_BCHW


def phi_KHW(labels_HW: NDArray[np.uint8], radius: int) -> NDArray[np.float64]:
    """Compute the term of the whole raster by scipy, class by class as the published code computes it."""
    edt = ndimage.distance_transform_edt
    found = []
    for k in range(K):
        inside_HW, others_HW = labels_HW == k, (labels_HW != k) & (labels_HW != IGNORED)
        out_HW, in_HW = (
            np.minimum(edt(~here_HW), radius) if here_HW.any() else np.full(here_HW.shape, float(radius))
            for here_HW in (inside_HW, others_HW)
        )
        found.append(np.where(inside_HW, -(in_HW - 1), out_HW))
    return np.stack(found)


@pytest.mark.parametrize("radius", [1, 4, 30])
def test_distances_are_those_of_scipy(radius: int) -> None:
    y_HW = labels_HW()
    y_HW[:, 20:] = np.where(y_HW[:, 20:] == 2, 0, y_HW[:, 20:])  # a class that is far from some
    padded = torch.from_numpy(np.pad(y_HW.astype(np.int16), radius, constant_values=-1))[None]
    found_KHW = signed_distances(padded, K, radius, IGNORED)[0].numpy()
    known_HW = y_HW != IGNORED
    assert np.allclose(found_KHW[:, known_HW], phi_KHW(y_HW, radius)[:, known_HW], rtol=1e-6, atol=0)
    assert found_KHW.max() == radius or radius == 30
    assert found_KHW.min() < 0 or radius == 1


@pytest.mark.parametrize("radius", [1, 2, 3])
def test_edges_are_pixels_near_another_class(radius: int) -> None:
    """Written down pixel by pixel."""
    y_HW, margin = labels_HW(), 4
    padded = torch.from_numpy(np.pad(y_HW.astype(np.int16), margin, constant_values=-1))[None]
    found_HW = edges_of(padded, radius, IGNORED, margin)[0].numpy()
    places = np.argwhere(y_HW != IGNORED)
    for row, col in places[:: 1 if radius == 1 else 7]:
        near = places[((places - (row, col)) ** 2).sum(1) <= radius**2]
        assert found_HW[row, col] == any(y_HW[r, c] != y_HW[row, col] for r, c in near)
    assert not found_HW[y_HW == IGNORED].any()
    assert 0.2 < found_HW.mean() < 0.95


def test_the_objective_follows_from_the_network() -> None:
    usual = TrainConfig().loss
    assert choose_objective(UNet(), usual, 9) == Objective((PixelTerm(9),))
    assert choose_objective(GatedSCNN(), usual, 9) == Objective((PixelTerm(9, attention=1.0), EdgesTerm(9)))
    found = choose_objective(GatedSCNN(), {"name": "edges", "radius": 4}, 9)
    assert found.terms[1] == EdgesTerm(9, radius=4)
    assert found.margin == 4
    with pytest.raises(ConfigError, match=r"train.loss: edges.dual is 2.0, but only gated_scnn gives edges; leave"):
        choose_objective(UNet(), {"edges": {"dual": 2.0}}, 9)
    with pytest.raises(ConfigError, match=r"train.class_weights has nothing to weigh in the boundary loss"):
        choose_objective(UNet(), "boundary", 9, (1.0, 2.0))


WEIGHTS = (0.5, 3.0, 1.5)
LOSS = {"cross_entropy": {"smoothing": 0.1}, "focal": 2.0, "boundary": 0.5}


def chosen(weights: tuple[float, ...] = (), loss: Any = "cross_entropy") -> Objective:
    """Of G-SCNN's outputs."""
    return choose_objective(GatedSCNN(classes=K), loss, IGNORED, weights)


def loss_of(objective: Objective, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Of the whole raster."""
    margin = objective.margin
    padded_BHW = torch.from_numpy(np.pad(labels_HW().astype(np.int16), margin, constant_values=-1))[None]
    value = objective.value(objective.sums(given, padded_BHW).detach())
    assert value is not None
    return value


def test_weights_and_losses_of_classes_go_with_the_edges() -> None:
    """Term by term: the classes' own as of any network, attention by weights of classes, edges by pixels."""
    given = outputs(3)
    target_P, scores_PK = torch.from_numpy(labels_HW()).long().reshape(-1), given[0][0].permute(1, 2, 0).reshape(-1, K)
    known_P = target_P != IGNORED
    weights_K = torch.tensor(WEIGHTS, dtype=torch.float64)
    entropies_P = functional.cross_entropy(scores_PK, target_P, weights_K, ignore_index=IGNORED, reduction="none")
    sure_P = torch.sigmoid(given[1]).reshape(-1) > 0.8
    attention = (entropies_P * sure_P).sum() / weights_K[target_P[known_P]].sum()
    edges = loss_of(Objective((EdgesTerm(IGNORED),)), given)
    smoothed = {"name": "cross_entropy", "smoothing": 0.1}
    for asked in ("cross_entropy", "focal", {"dice": 2.0, "boundary": 0.1}, smoothed):
        classes = choose_objective(UNet(classes=K), asked, IGNORED, WEIGHTS)
        expected = loss_of(classes, given) + attention + edges
        assert loss_of(chosen(WEIGHTS, asked), given).item() == pytest.approx(expected.item(), rel=1e-12)
    less = {"cross_entropy": 1.0, "edges": {"attention": 0.25}}
    whole, quarter = (loss_of(chosen(WEIGHTS, loss), given).item() for loss in ("cross_entropy", less))
    assert whole - quarter == pytest.approx(0.75 * attention.item(), rel=1e-9)
    alike = loss_of(chosen((1.0,) * K), given)
    assert alike.item() == pytest.approx(loss_of(chosen(), given).item(), rel=1e-12)


@pytest.mark.parametrize("weights", [(), WEIGHTS], ids=["alike", "weighted"])
def test_one_pass_does_where_all_means_are_over_the_same_pixels(weights: tuple[float, ...]) -> None:
    objective = chosen(weights, LOSS)
    assert objective.single != bool(weights)
    if weights:
        assert weighted(chosen((1.0,) * K, LOSS), weights) == objective
    by = "class-weighted " if weights else ""
    words = f"{by}cross-entropy (labels smoothed by 0.1) + 2 {by}focal (gamma 2) + 0.5 boundary"
    assert objective.in_words == f"{words} + {by}attention + 20 edges + dual"


LABELS_OF_CLASSES = LabelMap.from_config(
    [{"name": "sky", "values": [4]}, {"name": "road", "values": [5]}, {"name": "sea", "values": [9]}]
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("none", ()),
        ([1, 2.5, 0], (1.0, 2.5, 0.0)),
        ({1: 4}, (1.0, 4.0, 1.0)),
        ({"sea": 2, "0": 3}, (3.0, 1.0, 2.0)),
        ([1, 2], "has 2 weights for 3 classes; give one a class, or a map"),
        ([0, 0, 0], "all weights are 0; give one of them more than 0"),
        ({3: 1}, "'3' is no class; use some of 0 to 2, or of sky, road, sea"),
        ({1: 2, "road": 3}, "names class 1 twice"),
    ],
)
def test_given_weights(given: Any, expected: tuple[float, ...] | str) -> None:
    with pytest.raises(ConfigError, match=expected) if isinstance(expected, str) else nullcontext():
        assert given_weights(given, LABELS_OF_CLASSES) == expected


def test_a_band_of_edges_is_told_apart(material: Material, tmp_path: Path) -> None:
    config = material.config()
    config["model"] = {
        "name": "gated_scnn",
        "encoder": "resnet18",
        "base_channels": 8,
        "arguments": {"edge_band": True},
    }
    config["tiling"] = {"grid": 1}
    config["train"] = {"epochs": 1, "loss": {"name": "edges", "radius": 3, "dual": 2.0}}
    run = tiledseg.train_network({**config, "run": {"output": str(tmp_path / "run"), "verbosity": 0}})
    network = tiledseg.load(run).network
    assert network.layers["conv1"].weight.shape[1] == 2, "of three bands the encoder sees two"
    tiledseg.predict_raster(run, material.root / "held-out.tif", tmp_path / "map.tif", grid=1)
