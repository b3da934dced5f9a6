"""The names and colours of classes where a map is shown: as given, else as the files say, else the palette's."""

from __future__ import annotations

from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.classes import ClassRecord, default_classes
from tiledseg.raster.labels.label_map import LabelMap


def shown_classes(
    label_map: LabelMap | None, count: int, labels: RasterInfo, prediction: RasterInfo
) -> tuple[ClassRecord, ...]:
    """A record for each of `count` classes.

    Where `label_map` gives a class no name, or no colour, of its own, it has those of the labels' file (names in the
    tags CLASS_0, CLASS_1, ..., colours in the colour table), then those of the prediction's.
    """
    given = label_map or LabelMap.from_config(max(count, 2))
    by_raw = dict(given.resolve(labels).pairs)
    in_files = (_in_file(labels, by_raw), _in_file(prediction, {k: k for k in range(count)}))
    found = []
    for number, (record, default) in enumerate(zip(given.classes[:count], default_classes(count), strict=True)):
        for names, colours in in_files:
            if record.name == default.name:
                record = record._replace(name=names.get(number, record.name))
            if record.colour == default.colour:
                record = record._replace(colour=colours.get(number, record.colour))
        found.append(record)
    return tuple(found)


def _in_file(info: RasterInfo, by_raw: dict[int, int]) -> tuple[dict[int, str], dict[int, tuple[int, int, int]]]:
    """Names and colours by class."""
    names = {by_raw[raw]: name for raw, name in info.class_names if raw in by_raw}
    colours = {by_raw[raw]: colour[:3] for raw, colour in info.palette or () if raw in by_raw}
    return names, colours
