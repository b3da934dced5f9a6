"""A trained network with what its inputs and outputs mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tiledseg.architecture.foreign import ForeignNetwork
from tiledseg.architecture.network import Network
from tiledseg.checkpoint.folder import Checkpoint, find_checkpoint
from tiledseg.checkpoint.loading import load_network
from tiledseg.comm.mesh import Mesh
from tiledseg.config.checks import one_of
from tiledseg.config.kinds import checked
from tiledseg.errors import ConfigError
from tiledseg.execution.precision import PARAMETER_DTYPES
from tiledseg.models.dropout import set_dropout_key
from tiledseg.models.network import GraphNetwork
from tiledseg.raster.statistics import Normalization, Normalizer
from tiledseg.tracing.build import network_modules


@dataclass(frozen=True)
class Trained:
    """`network`: in evaluation mode, on the CPU, in the dtype that it was trained in; it takes normalised pixels
    (B, bands, height, width) and gives logits (B, classes, height, width)."""

    network: GraphNetwork
    checkpoint: Checkpoint

    @property
    def bands(self) -> int:
        """Return the number of bands of an image, as selected in the training."""
        return self.checkpoint.saved.network.bands

    @property
    def band_numbers(self) -> list[int]:
        """Return the bands of an image's file that it takes, from 1, in its order."""
        return self.checkpoint.saved.config.data.bands or list(range(1, self.bands + 1))

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return self.checkpoint.saved.network.classes

    @property
    def ignore_index(self) -> int:
        """Return the class number of pixels that count nowhere."""
        return self.checkpoint.saved.config.data.ignore_index

    @property
    def normalization(self) -> Normalization:
        """Return mean and deviation of each band over the training images."""
        return self.checkpoint.saved.normalization

    def normalize(self, pixels_CHW: NDArray, valid_HW: NDArray[np.bool_] | None = None) -> torch.Tensor:
        """Return a raster's pixels as a batch of one for `network`, x_BCHW; 0 where they are not valid."""
        dtype = torch.zeros((), dtype=next(self.network.parameters()).dtype).numpy().dtype
        valid_HW = np.ones(pixels_CHW.shape[1:], bool) if valid_HW is None else valid_HW
        return torch.from_numpy(Normalizer(self.normalization, pixels_CHW.dtype, dtype)(pixels_CHW, valid_HW))[None]


@checked
def load(run: str | Path, build: str | None = None, which: str = "latest") -> Trained:
    """Return the trained network of a run's folder, of its `latest` or `best` checkpoint, or of one checkpoint; the
    average of its weights, where the run has taken one.

    `build`: the function that has made a network of `model.build`: what a file says gets no code run that the user has
    not named. Raises ConfigError where it is another, CheckpointError where there is no checkpoint, or a file is not
    what was written.
    """
    checkpoint = find_named(run, build, which)
    return Trained(load_trained(checkpoint, checkpoint.saved.network), checkpoint)


def find_named(run: str | Path, build: str | None = None, which: str | None = None) -> Checkpoint:
    """Return the checkpoint of a run (`find_checkpoint`), or the one named, whose network the user knows
    (`check_named`)."""
    if which is not None:
        one_of("which", which, ("latest", "best"))
    checkpoint = find_checkpoint(run, which)
    check_named(checkpoint.saved.network, build)
    return checkpoint


def check_named(network: Network, build: str | None) -> None:
    """Raise ConfigError unless `build` is the function that builds the network, where one does: what a file says gets
    no code run that the user has not named."""
    own = network.build if isinstance(network, ForeignNetwork) else None
    if own is not None and build is None:
        raise ConfigError(
            f"the network was built by {own}, code that a checkpoint alone does not get run; name it: --build {own}, "
            f"or in Python load(run, build='{own}')"
        )
    if build is not None and build != own:
        there = f"was built by {own}" if own else "is one of this program's"
        raise ConfigError(f"--build is {build}, but the network {there}; give the same, or leave it out")


def load_trained(
    checkpoint: Checkpoint,
    network: Network,
    weights: Mapping[str, torch.Tensor] | None = None,
    mesh: Mesh | None = None,
) -> GraphNetwork:
    """Return the checkpoint's network, ready to map, on the CPU, in the dtype that it was trained in: no digit is lost.

    `weights` and buffers by name, in place of the checkpoint's, which the root of `mesh` reads for all (collective;
    None: this rank alone).
    """
    config = checkpoint.saved.config
    modules = network_modules(network, still=config.model.freeze_norm).to(PARAMETER_DTYPES[config.train.precision])
    if weights is None:
        load_network(checkpoint, modules, average=True, mesh=mesh)
    else:
        modules.load_state_dict(weights)
    set_dropout_key(modules)  # whoever trains it on gives keys, or has torch's draws
    return modules.eval()
