"""The normalisation of a raster by its own bands, in place of the training images': another city, another light.

Mean and deviation are over all valid pixels of the raster, those outside an area too, so that an area's map is a part
of the whole one. All ranks measure, each its share of a fixed grid; the result has the same bits for any number of
them.
"""

from __future__ import annotations

from tiledseg.comm.mesh import Mesh
from tiledseg.comm.watching.doing import doing, ticking
from tiledseg.errors import ConfigError, InputError
from tiledseg.inference.mapper import Mapper
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.reading.known_reader import KnownReader
from tiledseg.raster.reading.reader import open_raster
from tiledseg.raster.statistics import Normalization, finish, measure, merge, statistics_blocks

CHOICES = TRAINING, IMAGE = ("training", "image")


def check_own_statistics(normalize: str, mapper: Mapper) -> None:
    """Raise ConfigError where a raster is to be normalised for a network that takes pixels as they are."""
    given = mapper.normalization
    if normalize == IMAGE and (given is None or given == Normalization.identity(len(given.mean))):
        raise ConfigError(
            "--normalize is image, but the network takes pixels as they are (data.normalize false, or no --mean); use "
            "training"
        )


def own_statistics(path: str, mapper: Mapper, references: bool, mesh: Mesh, info: RasterInfo) -> Normalization:
    """Return the normalization of the raster's bands that the mapper takes. `info`: metadata of the raster.

    Collective: one gather and one broadcast, in that order, on all ranks. Any rank's InputError is raised on every
    rank."""
    error: InputError | None = None
    sums = None
    try:
        with (
            KnownReader(info, lambda: open_raster(path, mapper.bands, mapper.nodata, references)) as reader,
            doing("taking the statistics of the bands"),
        ):
            blocks = statistics_blocks([info], mesh.rank, mesh.size)
            sums = measure([reader], ticking(blocks))
    except InputError as found:
        error = found
    mesh.agree(error)
    parts = mesh.communicator.gather_objects(sums)
    return mesh.on_root(lambda: finish(merge(parts)))
