"""Stand-ins with the names and arguments that docs/how-to/from-other-libraries.md uses: of Lightning if it is absent,
of torchgeo 0.10.1 and raster-vision 0.31.1, which import torchvision. `test_examples.py` runs the page with them."""

import importlib.util
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from benchmarks.stand_ins import stand_ins

with stand_ins():
    import segmentation_models_pytorch as smp

Sample = dict[str, torch.Tensor]


class Trainer:
    def __init__(self, **options: Any) -> None:
        pass

    def fit(self, model: Any, train_dataloaders: Any = None, val_dataloaders: Any = None) -> None:
        assert val_dataloaders or not hasattr(model, "validation_step"), "torchgeo's schedule follows val_loss"
        for index, item in enumerate(train_dataloaders or model.train_dataloader()):
            train_dataloaders or model.on_train_epoch_start()
            model.training_step(item, index).backward()
            model.configure_optimizers().step()


if importlib.util.find_spec("lightning"):
    import lightning
    from lightning import Trainer  # type: ignore[assignment]
else:
    base = type("LightningModule", (torch.nn.Module,), {"current_epoch": 0})
    lightning = SimpleNamespace(LightningModule=base, Trainer=Trainer)


class GeoDataset:
    def __init__(self, **arrays: torch.Tensor) -> None:
        self.arrays = arrays

    def __and__(self, other: "GeoDataset") -> "GeoDataset":
        return GeoDataset(**self.arrays, **other.arrays)

    def __getitem__(self, window: Any) -> Sample:
        return {key: array[..., *window] for key, array in self.arrays.items()}


class RandomPatchSampler(list[tuple[slice, slice]]):
    def __init__(self, dataset: GeoDataset, *, size: int, length: int) -> None:
        corners = [[random.randrange(side - size) for side in dataset[:, :]["mask"].shape] for _ in range(length)]
        super().__init__((slice(row, row + size), slice(col, col + size)) for row, col in corners)


def stack_samples(samples: list[Sample]) -> Sample:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


class SemanticSegmentation(lightning.LightningModule):
    def __init__(self, *, model: str, backbone: str, in_channels: int, num_classes: int, ignore_index: int) -> None:
        super().__init__()
        self.model = {"unet": smp.Unet}[model](
            backbone, encoder_weights=None, in_channels=in_channels, classes=num_classes
        )
        self.ignore_index = ignore_index

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        return cross_entropy(self.model(batch["image"]), batch["mask"], ignore_index=self.ignore_index)

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class SemanticSegmentationSlidingWindowGeoDataset:
    def __init__(self, scene: Any, size: int, stride: int) -> None:
        _, _, rows, cols = scene.extent
        self.pixels = scene.pixels
        self.windows = [(y, x, y + size, x + size) for y in range(0, rows, stride) for x in range(0, cols, stride)]


class Learner(SimpleNamespace):
    def predict_dataset(self, dataset: Any, raw_out: bool = True, numpy_out: bool = False) -> Iterator[Any]:
        for top, left, bottom, right in dataset.windows:
            scores = self.model(dataset.pixels[None, :, top:bottom, left:right] / 255)[0].detach().softmax(0)
            labels = scores if raw_out else scores.argmax(0)
            yield labels.numpy() if numpy_out else labels


class SemanticSegmentationLabels:
    @staticmethod
    def from_predictions(windows: Any, predictions: Any, extent: Any, num_classes: int) -> Any:
        labels = np.zeros(extent[2:], np.uint8)
        for (top, left, bottom, right), prediction in zip(windows, predictions, strict=True):
            labels[top:bottom, left:right] = prediction.astype(np.uint8)
        return labels
