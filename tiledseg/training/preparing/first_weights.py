"""The encoder of published weights that a run begins with, and the normalisation of its pixels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tiledseg.architecture.network import Network, Pretrainable
from tiledseg.comm.mesh import Mesh
from tiledseg.errors import CheckpointError, ConfigError
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.statistics import Normalization

if TYPE_CHECKING:
    from tiledseg.checkpoint.pretrained import FirstWeights

# Of ImageNet's pixels from 0 to 1, red, green and blue: torchvision's documentation of its weights.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def first_weights(path: str | None, network: Network, mesh: Mesh) -> FirstWeights | None:
    """Read the file of `model.pretrained` for the network; None if there is none. Collective.

    Every rank reads the file, and the root's fault or any other's is raised on all. Raises CheckpointError too where
    ranks have read other files.
    """
    if path is None:
        return None
    from tiledseg.checkpoint.pretrained import load_pretrained

    assert isinstance(network, Pretrainable), "presets refuse the key elsewhere"
    found = mesh.on_all(lambda: load_pretrained(path, network))
    if len(set(mesh.communicator.gather_objects(found.origin))) > 1:
        raise CheckpointError(f"{path} is not the same file on all ranks; give one that all of them share")
    return found


def check_imagenet(image: RasterInfo) -> None:
    """Raise ConfigError where the images are not what ImageNet's mean and deviation speak of."""
    if image.dtype != "uint8" or image.bands < 3:
        raise ConfigError(
            f"data.normalize is imagenet, for red, green and blue of 8 bits, but {image.path} has {image.bands} bands "
            f"of {image.dtype}; set it to true, or select such bands with data.bands"
        )


def imagenet(measured: Normalization) -> Normalization:
    """Return the normalisation with ImageNet's for the first three bands, of 8 bits; others are as measured."""
    mean, deviation = (tuple(255 * value for value in values) for values in (MEAN, DEVIATION))
    constant = tuple(band for band in measured.constant if band >= len(MEAN))
    return replace(
        measured,
        mean=(*mean, *measured.mean[len(mean) :]),
        std=(*deviation, *measured.std[len(deviation) :]),
        constant=constant,
    )
