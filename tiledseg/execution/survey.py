"""One look at every training pixel before the first step: statistics of the bands, and that every label has a class.

The ranks share the blocks; the result has the same bits for any number of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiledseg.comm.doing import doing, ticking
from tiledseg.comm.mesh import Mesh
from tiledseg.errors import InputError
from tiledseg.raster.labels import LabelMap, read_labels
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.statistics import Normalization, PartialSums, finish, measure, merge, statistics_blocks


def survey(
    mesh: Mesh, images: Sequence[RasterReader], labels: Sequence[RasterReader], label_map: LabelMap, normalize: bool
) -> Normalization:
    """The normalisation of `images`. Collective; any rank's InputError (a label outside the classes, a block that
    cannot be read) is raised on every rank."""
    error: InputError | None = None
    sums: PartialSums | None = None
    try:
        with doing("looking at every label"):
            check_labels(labels, label_map, mesh.rank, mesh.size)
        if normalize:
            blocks = statistics_blocks([r.info for r in images], mesh.rank, mesh.size)
            with doing("taking the statistics of the bands"):
                sums = measure(images, ticking(blocks))
    except InputError as found:
        error = found
    mesh.agree(error)
    if not normalize:
        return Normalization.identity(images[0].info.bands)
    parts = mesh.communicator.gather_objects(sums)
    return mesh.on_root(lambda: finish(merge(parts)))


def check_labels(labels: Sequence[RasterReader], label_map: LabelMap, rank: int, size: int) -> None:
    """Raise LabelError for the first value outside the classes in this rank's share of the blocks."""
    maps = [label_map.resolve(reader.info) for reader in labels]
    current = None
    for block in ticking(statistics_blocks([reader.info for reader in labels], rank, size)):
        reader = labels[block.image]
        if current is not None and current is not reader:
            current.release()  # blocks come file by file: no more than one is held open
        current = reader
        read_labels(reader, maps[block.image], block.box)
