"""The names and colours of classes where a map is shown: as given, else as the files say, else the palette's."""

from __future__ import annotations

from tiledseg.errors import LabelError
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


def check_names(label_map: LabelMap, labels: RasterInfo, prediction: RasterInfo) -> list[str]:
    """A line on classes that have one name in the labels, by `label_map` or else by their file, and another in the
    prediction's file, if there are any. Raises LabelError where a class of one has another number in the other."""
    pairs = label_map.resolve(labels).pairs
    once = {raw: k for raw, k in pairs if sum(other == k for _, other in pairs) == 1}
    truth = {k: name for k, name in _in_file(labels, once)[0].items() if k < label_map.count}
    defaults = {record.name for record in default_classes(label_map.count)}
    truth |= {k: record.name for k, record in enumerate(label_map.classes) if record.name not in defaults}
    mapped = {k: name for k, name in prediction.class_names if name not in defaults}
    numbers = {name: k for k, name in mapped.items()}
    moved = [k for k, name in truth.items() if numbers.get(name, k) != k and truth[k] != mapped.get(k)]
    if moved:
        name = truth[moved[0]]
        raise LabelError(
            f"{prediction.path} holds class {name} as {numbers[name]}, but of {labels.path} it is {moved[0]}; give "
            "classes that bring the labels' values to the numbers of the map"
        )
    others = [k for k, name in sorted(truth.items()) if mapped.get(k, name) != name]
    if not others:
        return []
    first = others[0]
    more = f", and so are {len(others) - 1} more" if len(others) > 1 else ""
    return [
        f"class {first} is '{truth[first]}' of {labels.path} and '{mapped[first]}' of {prediction.path}{more}: scores "
        "compare numbers, whatever their names"
    ]


def _in_file(info: RasterInfo, by_raw: dict[int, int]) -> tuple[dict[int, str], dict[int, tuple[int, int, int]]]:
    """Names and colours by class."""
    names = {by_raw[raw]: name for raw, name in info.class_names if raw in by_raw}
    colours = {by_raw[raw]: colour[:3] for raw, colour in info.palette or () if raw in by_raw}
    return names, colours
