"""Weights of classes as keys give them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tiledseg.errors import ConfigError
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.training.choose_objective import given_weights

CLASSES = LabelMap.from_config(
    [{"name": "sky", "values": [4]}, {"name": "road", "values": [5]}, {"name": "sea", "values": [9]}]
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("none", ()),
        ([1, 2.5, 0], (1.0, 2.5, 0.0)),
        ({1: 4}, (1.0, 4.0, 1.0)),
        ({"2": 0.5, "0": 3}, (3.0, 1.0, 0.5)),
        ({"sea": 2, "0": 3}, (3.0, 1.0, 2.0)),
    ],
)
def test_given_weights(given: Any, expected: tuple[float, ...]) -> None:
    assert given_weights(given, CLASSES) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1, 2], "has 2 weights for 3 classes; give one a class, or a map"),
        ([0, 0, 0], "with which no pixel counts; give one of them more than 0"),
        ({3: 1}, "has '3', which is no class; give some of 0 to 2, or of sky, road, sea"),
        ({"tree": 1}, "has 'tree', which is no class"),
        ({1: 2, "1": 3}, "names class 1 twice; leave one of them out"),
        ({1: 2, "road": 3}, "names class 1 twice"),
    ],
)
def test_weights_that_are_not_of_these_classes(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        given_weights(given, CLASSES)
