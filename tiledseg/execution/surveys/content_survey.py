"""What the labels hold, region by region: counted by all ranks, each its share, the same for any number of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tiledseg.comm.mesh import Mesh
from tiledseg.comm.watching.doing import doing
from tiledseg.errors import InputError
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.samples.content import Unit, count_units


def survey_content(
    mesh: Mesh,
    units: Sequence[Unit],
    images: Sequence[RasterReader],
    labels: Sequence[RasterReader],
    label_map: LabelMap,
) -> NDArray[np.int64]:
    """Return `count_units` of all units, on every rank. Collective; any rank's InputError is raised on every rank.

    All ranks agree, then gather, in this order, whatever they found: none waits for another.
    """
    counts: NDArray[np.int64] | None = None
    error: InputError | None = None
    mine = units[mesh.rank * len(units) // mesh.size : (mesh.rank + 1) * len(units) // mesh.size]
    try:
        with doing("counting labels by their places"):
            counts = count_units(mine, images, labels, label_map)
    except InputError as found:
        error = found
    mesh.agree(error)
    return np.concatenate(mesh.communicator.gather_objects(counts))
