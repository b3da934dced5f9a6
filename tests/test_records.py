"""`records.dataclass` makes what the standard library's makes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import asdict, field, replace
from typing import Any, ClassVar

import pytest

from tiledseg import records


class Written:
    """The classes' bodies, without a decorator."""

    class Point:
        """A point."""

        row: int
        col: int = 2
        names: list[str] = field(default_factory=list)
        seen: float = field(default=0.0, compare=False, repr=False)
        UNIT: ClassVar[str] = "px"

    class Checked:
        size: int

        def __post_init__(self) -> None:
            if self.size < 0:
                raise ValueError(f"size {self.size}")

    class Empty:
        """Without fields."""

    class Own:
        """Compares itself."""

        value: int

        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            return "own"


def both(name: str, **options: Any) -> tuple[Any, Any]:
    """The class of that body, as the standard library makes it and as `records` does."""
    body = getattr(Written, name)
    kinds = []
    for make in (dataclasses.dataclass, records.dataclass):
        members = {key: value for key, value in vars(body).items() if key not in ("__dict__", "__weakref__")}
        kinds.append(make(**options)(type(name, (), copy.copy(members))))
    return kinds[0], kinds[1]


WAYS: list[dict[str, Any]] = [{}, {"frozen": True}, {"frozen": True, "order": True}, {"eq": False}]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("Point", [(1,), (1, 2, ["a"]), (1, 2, ["a"], 5.0), (0, 7)]),
        ("Checked", [(1,), (2,), (2,)]),
        ("Empty", [(), ()]),
        ("Own", [(1,), (2,)]),
    ],
)
def test_values_are_shown_and_compared_alike(name: str, given: list[tuple[Any, ...]], options: dict[str, Any]) -> None:
    theirs, ours = both(name, **options)
    for first in given:
        assert repr(ours(*first)) == repr(theirs(*first))
        assert asdict(ours(*first)) == asdict(theirs(*first))
        for second in given:
            assert (ours(*first) == ours(*second)) == (theirs(*first) == theirs(*second)), (first, second)
            if options.get("order") and name != "Own":
                assert (ours(*first) < ours(*second)) == (theirs(*first) < theirs(*second))
                assert (ours(*first) >= ours(*second)) == (theirs(*first) >= theirs(*second))
        assert ours(*first) != theirs(*first) or name == "Own"


@pytest.mark.parametrize("name", ["Checked", "Empty"])
def test_hashes_are_equal(name: str) -> None:
    theirs, ours = both(name, frozen=True)
    given = (3,) if name == "Checked" else ()
    assert hash(ours(*given)) == hash(theirs(*given))
    for options in ({}, {"eq": False}):
        assert [kind.__hash__ is None for kind in both(name, **options)] in ([True] * 2, [False] * 2)
    for kind in both("Own", frozen=True):
        assert hash(kind(4)) == hash((4,))


def test_parameters_are_the_same() -> None:
    theirs, ours = (inspect.signature(kind).parameters.values() for kind in both("Point", frozen=True))
    for their, our in zip(theirs, ours, strict=True):
        assert (our.name, our.kind, our.annotation) == (their.name, their.kind, their.annotation)
        assert (our.default is our.empty) == (their.default is their.empty)
    for kind in both("Point"):
        with pytest.raises(TypeError, match=r"Point\.__init__\(\) missing 1 required positional argument: 'row'"):
            kind()
        assert kind(1).names is not kind(1).names, "each has a list of its own"


def test_frozen_values_stay() -> None:
    for kind in both("Point", frozen=True):
        point = kind(1)
        with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'row'"):
            point.row = 2
        with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'row'"):
            del point.row
        assert replace(point, row=5).row == 5
        with pytest.raises(TypeError):
            hash(point)  # of a list


def test_a_plain_subclass_adds_attributes_of_its_own() -> None:
    for kind in both("Checked", frozen=True):
        made = type("Sub", (kind,), {})(3)
        made.other = 4
        assert made.other == 4
        del made.other
        assert not hasattr(made, "other")
        with pytest.raises(dataclasses.FrozenInstanceError, match="size"):
            made.size = 4
        with pytest.raises(dataclasses.FrozenInstanceError, match="size"):
            del made.size


def test_faults_are_met_after_the_fields() -> None:
    for kind in both("Checked", frozen=True):
        with pytest.raises(ValueError, match="size -1"):
            kind(-1)
        with pytest.raises(ValueError, match="size -2"):
            replace(kind(1), size=-2)


@records.dataclass(frozen=True)
class Node:
    """Of a tree."""

    name: str
    below: tuple[Node, ...] = ()


@records.dataclass(frozen=True)
class Leaf(Node):
    """One more field, after those of its base."""

    weight: int = 1


def test_a_subclass_adds_fields_and_is_another_class() -> None:
    assert [each.name for each in dataclasses.fields(Leaf)] == ["name", "below", "weight"]
    leaf = Leaf("a", weight=2)
    assert leaf == Leaf("a", (), 2) != Leaf("a")
    assert Node("a") != Leaf("a"), "values of two classes differ"
    assert repr(Node("b", (leaf,))) == "Node(name='b', below=(Leaf(name='a', below=(), weight=2),))"
    for value in (leaf, Node("b", (leaf,))):
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value


def test_fields_of_other_kinds_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"Other\.a is a field for the standard library's dataclass"):

        @records.dataclass
        class Other:
            a: int = field(default=1, kw_only=True)
