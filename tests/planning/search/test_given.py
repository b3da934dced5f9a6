"""A search beside settings that are given: they are kept, or refused by name."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.planning.search.test_best import question
from tiledseg.errors import ConfigError, InputError
from tiledseg.planning.run.blocks import BlocksAsked
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.run.plan import plan_run
from tiledseg.planning.run.question import Extent
from tiledseg.planning.search.best import search
from tiledseg.planning.search.space import FREE

GIVEN: dict[str, dict[str, Any]] = {
    "a mode": {"halo": "exchange"},
    "a mesh that is no near square": {"halo": "layer", "mesh": (4, 1)},
    "fusion": {"halo": "layer", "fusion": 3},
    "three stages of a host of two": {"stages": 3},
    "a balance": {"stages": 2, "balance": (14, 15), "schedule": "gpipe"},
    "micro-batches": {"stages": 2, "micro_batches": 3, "recompute": ("except_last",) * 2},
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("case", GIVEN)
def test_what_is_given_is_in_all_that_is_found(case: str) -> None:
    given = GIVEN[case]
    asked = replace(question(4), parallel=Parallelism(**given))
    found = search(asked, 2, free=FREE - given.keys())
    for each in found.best:
        parallel = each.candidate.question(asked).parallel
        for name, value in given.items():
            assert getattr(parallel, name) == value, name
    assert found.winner.ranks > 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stages": 2, "halo": "layer"}, "no search combines parallel.halo layer, parallel.stages 2 for 4 ranks"),
        ({"stages": 2, "recompute": ("never", "always")}, "with one word of recompute for all stages; leave one"),
        ({"stages": 5}, "parallel.stages is 5, but the job has 4 ranks; start 5 ranks"),
        ({"halo": "layer", "mesh": (5, 1)}, "parallel.mesh is [5, 1]"),
    ],
)
def test_what_cannot_be_together_is_one_line(given: dict[str, Any], words: str) -> None:
    asked = replace(question(4), parallel=Parallelism(**given))
    with pytest.raises(InputError) as told:
        search(asked, 4, free=FREE - given.keys())
    assert words in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.usefixtures("small")
def test_where_nothing_fits_the_nearest_is_named_with_what_it_lacks() -> None:
    """A little more than that, and it is found."""
    asked = question(2, memory=2 << 20, grid=(3, 4))
    with pytest.raises(ConfigError) as told:
        search(asked, 1)
    said = re.search(r"; the nearest, .*, needs (\d+), (\d+) bytes more\)", str(told.value))
    assert said is not None, told.value
    assert "memory.blocks" not in str(told.value), "they do not fit either"
    needed, lacks = map(int, said.groups())
    assert needed - lacks == 2 << 20
    assert search(replace(asked, memory=int(1.02 * needed)), 1).winner.memory <= 1.02 * needed
    with pytest.raises(ConfigError):
        search(replace(asked, memory=int(0.9 * needed)), 1)


def test_blocks_are_named_where_they_fit_and_nothing_else_does() -> None:
    asked = question(1, memory=128 << 20, norm="instance", rasters=(Extent((1024, 1024)),))
    with pytest.raises(ConfigError) as told:
        search(asked, 1)
    words = r"use memory\.blocks with memory\.store, .* \((\d+) bytes with (\d+) x \d+ of them\), more"
    said = re.search(words, str(told.value))
    assert said is not None, told.value
    needed, side = map(int, said.groups())
    assert plan_run(replace(asked, blocks=BlocksAsked((side, side), in_file=True))).memory == needed <= 128 << 20
