"""A trained network with what its inputs and outputs mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tiledseg.architecture.network import Network
from tiledseg.checkpoint.folder import Checkpoint, find_checkpoint, load_network
from tiledseg.execution.precision import PARAMETER_DTYPES
from tiledseg.models.network import GraphNetwork, build_modules
from tiledseg.raster.dataset import Normalizer
from tiledseg.raster.statistics import Normalization


@dataclass(frozen=True)
class Trained:
    """`network`: in evaluation mode, on the CPU, in the dtype that it was trained in; it takes normalised pixels
    (B, bands, height, width) and gives logits (B, classes, height, width)."""

    network: GraphNetwork
    checkpoint: Checkpoint

    @property
    def bands(self) -> int:
        """Bands of an image, selected and in the order of the training."""
        return self.checkpoint.saved.network.bands

    @property
    def classes(self) -> int:
        """Classes that the network tells apart."""
        return self.checkpoint.saved.network.classes

    @property
    def ignore_index(self) -> int:
        """The class number of pixels that count nowhere."""
        return self.checkpoint.saved.config.data.ignore_index

    @property
    def normalization(self) -> Normalization:
        """Mean and deviation of each band over the training images."""
        return self.checkpoint.saved.normalization

    def normalize(self, pixels_CHW: NDArray, valid_HW: NDArray[np.bool_] | None = None) -> torch.Tensor:
        """A raster's pixels as a batch of one for `network`, x_BCHW; 0 where they are not valid."""
        dtype = torch.zeros((), dtype=next(self.network.parameters()).dtype).numpy().dtype
        valid_HW = np.ones(pixels_CHW.shape[1:], bool) if valid_HW is None else valid_HW
        return torch.from_numpy(Normalizer(self.normalization, pixels_CHW.dtype, dtype)(pixels_CHW, valid_HW))[None]


def load(run: str | Path) -> Trained:
    """The trained network of a run's folder, of its newest checkpoint, or of one checkpoint.

    Raises CheckpointError where there is none, or where a file is not what was written.
    """
    checkpoint = find_checkpoint(run)
    return Trained(load_trained(checkpoint, checkpoint.saved.network), checkpoint)


def load_trained(
    checkpoint: Checkpoint, network: Network, weights: Mapping[str, torch.Tensor] | None = None
) -> GraphNetwork:
    """The checkpoint's network, ready to map, on the CPU, in the dtype that it was trained in: no digit is lost.

    `weights` and buffers by name, in place of the checkpoint's.
    """
    modules = build_modules(network).to(PARAMETER_DTYPES[checkpoint.saved.config.train.precision])
    if weights is None:
        load_network(checkpoint, modules)
    else:
        modules.load_state_dict(weights)
    return modules.eval()
