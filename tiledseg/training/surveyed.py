"""Facts that a run reads before its first step: pretrained weights, statistics of pixels, weights of classes, labels by
place. All ranks read; each pixel is read once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING

from tiledseg.architecture.network import Network, Pretrainable
from tiledseg.comm.failure import mark_agreed
from tiledseg.comm.mesh import Mesh
from tiledseg.config.data import IMAGENET
from tiledseg.errors import CheckpointError, LabelError
from tiledseg.execution.progress import Shown, StepProgress, unseen
from tiledseg.execution.survey import survey, survey_content
from tiledseg.raster.labels.label_map import median_frequency_weights
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.samples.content import Content, square_units, tile_units
from tiledseg.raster.samples.sampling import DrawnTiles, DrawnWindows
from tiledseg.raster.statistics import Normalization
from tiledseg.training.choose_objective import weighted
from tiledseg.training.preparation import Preparation
from tiledseg.training.resuming import Beginning

if TYPE_CHECKING:
    from tiledseg.checkpoint.weights_file import FirstWeights

# Of ImageNet's pixels from 0 to 1, red, green and blue: torchvision's documentation of its weights.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LEAST_SQUARE = 16  # pixels along the side of a region of labels, where windows are drawn by them


def first_weights(path: str | None, network: Network, mesh: Mesh) -> FirstWeights | None:
    """Read the file of `model.pretrained` for the network; None if there is none. Collective.

    Every rank reads the file, and the root's fault or any other's is raised on all. Raises CheckpointError too where
    ranks have read other files.
    """
    if path is None:
        return None
    from tiledseg.checkpoint.weights_file import load_pretrained

    assert isinstance(network, Pretrainable), "presets refuse the key elsewhere"
    found = mesh.on_all(lambda: load_pretrained(path, network))
    if len(set(mesh.communicator.gather_objects(found.origin))) > 1:
        raise CheckpointError(f"{path} is not the same file on all ranks; give one that all of them share")
    return found


def look(preparation: Preparation, beginning: Beginning, mesh: Mesh) -> tuple[Normalization, Preparation]:
    """Return the normalisation, and the preparation with its classes' weights: of the checkpoint, whose network has
    learned with them, else measured. All labels that are new are looked at. Collective."""
    checkpoint, normalize = beginning.checkpoint, preparation.config.data.normalize
    count = preparation.counts_classes and not beginning.has_class_weights
    numbers = range(len(preparation.training.images)) if checkpoint is None or count else beginning.added
    if numbers:
        with ExitStack() as stack:
            images, labels = _opened(preparation, numbers, stack)
            shown: Shown = unseen
            if mesh.is_root:
                shown = stack.enter_context(closing(StepProgress(0, 0, preparation.config.run.verbosity))).part
            measures = normalize is not False and checkpoint is None
            found = survey(mesh, images, labels, preparation.label_map, measures, count, shown)
        if checkpoint is None and not found.labels.any():
            raise mark_agreed(
                LabelError(
                    "no pixel of data.labels is of a class: all are data.ignore_index "
                    f"({preparation.label_map.ignore_index}), without data or outside of what is trained on; look at "
                    "data.labels, data.classes and data.area"
                )
            )
        absent = [str(k) for k, pixels in enumerate(found.labels.tolist()) if not pixels]
        if checkpoint is None and absent and found.unlabelled:
            number = preparation.label_map.ignore_index
            note = (
                f"no label has class {', '.join(absent)}, and {found.unlabelled:,} label pixels count nowhere, as they "
                f"are {number} or without data; if {number} is a class, give it in data.classes by its values "
                "(docs/how-to/own-data.md)"
            )
            preparation = replace(preparation, warnings=(*preparation.warnings, note))
        if found.counts is not None:
            absent = [str(k) for k, pixels in enumerate(found.counts.sum(axis=0).tolist()) if not pixels]
            note = f"no training pixel is of class {', '.join(absent)}: its weight in the loss is 1"
            preparation = replace(preparation, warnings=(*preparation.warnings, *([note] if absent else [])))
            preparation = _with_class_weights(preparation, median_frequency_weights(found.counts))
        if checkpoint is None:
            return _imagenet(found.normalization) if normalize == IMAGENET else found.normalization, preparation
    assert checkpoint is not None, "a new run looks at all its images"
    if preparation.counts_classes and not count:
        preparation = _with_class_weights(preparation, checkpoint.saved.class_weights)
    return checkpoint.saved.normalization, preparation


def count_by_place(preparation: Preparation, mesh: Mesh) -> Preparation:
    """Return the preparation with steps drawn by what the labels hold: counted in each run, also in one that goes on.
    Collective. Raises ConfigError where too little is left."""
    steps, asked = preparation.sampler, preparation.by_content
    if asked is None:
        return preparation
    if isinstance(steps, DrawnWindows):
        units = square_units(steps.drawer.shapes, max(LEAST_SQUARE, steps.side // 2))
    else:
        units = tile_units(preparation.training.tilings)
    with ExitStack() as stack:
        images, labels = _opened(preparation, range(len(preparation.training.labels)), stack)
        counts = survey_content(mesh, units, images, labels, preparation.label_map)
    content = Content(tuple(region for unit in units for region in unit), counts, asked)
    if isinstance(steps, DrawnWindows):
        return replace(preparation, sampler=replace(steps, content=content))
    assert isinstance(steps, DrawnTiles), "there are no other steps"
    drawn = replace(steps, sampler=replace(steps.sampler, content=content), tilings=preparation.plan.tilings)
    return replace(preparation, sampler=drawn)


def _opened(
    preparation: Preparation, numbers: Sequence[int], stack: ExitStack
) -> tuple[list[RasterReader], list[RasterReader]]:
    """Open images and labels until the end of the stack."""
    rasters = preparation.training
    images = [stack.enter_context(rasters.open_counted(number)) for number in numbers]
    return images, [stack.enter_context(rasters.open_labels(number)) for number in numbers]


def _with_class_weights(preparation: Preparation, weights: tuple[float, ...]) -> Preparation:
    return replace(preparation, class_weights=weights, objective=weighted(preparation.objective, weights))


def _imagenet(measured: Normalization) -> Normalization:
    """Return the normalisation with ImageNet's for the first three bands, of 8 bits; others are as measured."""
    mean, deviation = (tuple(255 * value for value in values) for values in (MEAN, DEVIATION))
    constant = tuple(band for band in measured.constant if band >= len(MEAN))
    return replace(
        measured,
        mean=(*mean, *measured.mean[len(mean) :]),
        std=(*deviation, *measured.std[len(deviation) :]),
        constant=constant,
    )
