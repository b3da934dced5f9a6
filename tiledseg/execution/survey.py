"""The survey of all training pixels before the first step: statistics of the bands, a check that every label has a
class, and on request the pixels of each class.

The ranks share the blocks; the result has the same bits for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tiledseg.comm.doing import doing, ticking
from tiledseg.comm.mesh import Mesh
from tiledseg.execution.progress import Shown, unseen
from tiledseg.raster.labels.label_map import LabelMap, count_classes, read_labels
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.samples.content import Unit, count_units
from tiledseg.raster.statistics import Normalization, Sums, finish, measure, statistics_blocks


class Survey:
    """A survey of the training pixels. `counts`: valid pixels of each class in each image, or None. `labels`: pixels of
    each class in all label rasters, valid in the image or not; `unlabelled`: pixels without a class."""

    def __init__(
        self,
        mesh: Mesh,
        images: Sequence[RasterReader],
        labels: Sequence[RasterReader],
        label_map: LabelMap,
        normalize: bool,
        count: bool = False,
        shown: Shown = unseen,
    ) -> None:
        """Take the normalisation of `images`, and with `count` the pixels of each class that are valid in image and
        label.

        Collective. An InputError of any rank (a label outside the classes, a block that cannot be read) is raised on
        every rank. `count` reads the images once more, for the validity of their pixels.
        """
        counts = np.zeros((len(images), label_map.count), np.int64) if count else None

        def look() -> NDArray[np.int64]:
            """Count this rank's share of the label pixels by class number, the valid ones in `counts`."""
            maps = [label_map.resolve(reader.info) for reader in labels]
            current: list[RasterReader] = []
            numbers = np.zeros(256, np.int64)
            blocks = statistics_blocks([reader.info for reader in labels], mesh.rank, mesh.size)
            with doing("looking at every label"):
                for block in ticking(shown(blocks, len(blocks), "looking at every label")):
                    readers = [labels[block.image], images[block.image]][: 1 + count]
                    if current and current[0] is not readers[0]:
                        for reader in current:
                            reader.release()  # blocks come file by file: one file of each kind is open at a time
                    current = readers
                    classes_HW = read_labels(labels[block.image], maps[block.image], block.box)
                    numbers += np.bincount(classes_HW.ravel(), minlength=256)
                    if counts is not None:
                        valid_HW = images[block.image].read(block.box)[1] & (classes_HW != label_map.ignore_index)
                        counts[block.image] += count_classes(classes_HW, valid_HW, label_map.count)
            return numbers

        numbers = mesh.on_all(look)
        self.counts = sum(mesh.communicator.gather_objects(counts)) if count else None
        every = sum(mesh.communicator.gather_objects(numbers), start=np.zeros(256, np.int64))
        self.labels, self.unlabelled = every[: label_map.count], int(every[label_map.count :].sum())
        self.normalization = Normalization.identity(images[0].info.bands)
        if normalize:
            self.normalization = band_statistics(mesh, images, shown)


def band_statistics(mesh: Mesh, images: Sequence[RasterReader], shown: Shown = unseen) -> Normalization:
    """Return mean and deviation of each band over all valid pixels of `images`. Collective. An InputError of any rank
    is raised on every rank."""

    def sums() -> Sums:
        blocks = statistics_blocks([reader.info for reader in images], mesh.rank, mesh.size)
        with doing("taking the statistics of the bands"):
            return measure(images, ticking(shown(blocks, len(blocks), "taking the statistics of the bands")))

    parts = mesh.communicator.gather_objects(mesh.on_all(sums))
    return mesh.on_root(lambda: finish(np.concatenate(parts), images[0].info.times))


def survey_content(
    mesh: Mesh,
    units: Sequence[Unit],
    images: Sequence[RasterReader],
    labels: Sequence[RasterReader],
    label_map: LabelMap,
) -> NDArray[np.int64]:
    """Return `count_units` of all units on every rank. Collective. An InputError of any rank is raised on every
    rank."""
    mine = units[mesh.rank * len(units) // mesh.size : (mesh.rank + 1) * len(units) // mesh.size]
    with doing("counting labels by their places"):
        counts = mesh.on_all(lambda: count_units(mine, images, labels, label_map))
    return np.concatenate(mesh.communicator.gather_objects(counts))
