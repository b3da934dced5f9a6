"""Every key of a configuration meets every kind of value that it cannot hold: one line, exit 2, nothing written."""

from __future__ import annotations

import math
import re
import time
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bad_input.materials import good_config
from tests.conftest import NIGHTLY
from tests.small_files import tree, write_raster, write_yaml
from tiledseg.config.checks import check_values, range_of
from tiledseg.config.run import Config, ModelConfig
from tiledseg.errors import ConfigError
from tiledseg.train import main

GROUPS = {group.name: group.default_factory for group in fields(Config)}
KEYS = [(group, key) for group, kind in GROUPS.items() for key in fields(kind)]  # type: ignore[arg-type]
FREE_TEXT = ("data.images", "data.labels", "data.val_images", "data.val_labels", "train.resume", "run.output")
VALUES = {
    "null": "null",
    "NaN": ".nan",
    "infinite": "-.inf",
    "overflowing": "1e400",
    "negative": "-1",
    "2^63": str(2**63),
    "2^64": str(2**64),
    "huge fraction": "1e300",
    "word": "many",
    "list": "[7, 8, 9]",
    "list of huge": f"[{2**63}, {2**63}]",
    "nested list": "[[1]]",
    "map": "{a: {b: 1}}",
    "date": "2026-01-01",
    "NUL": '"a\\0b"',
}


FITTING = {("train.class_weights", "list"): "[7, 8, 9] are weights of the three classes"}
NEVER = ("map", "NUL", "nested list")


def may_hold(name: str, key: Field[Any], kind: str) -> bool:
    """Values that a key takes, or that mean a file which may be there."""
    if kind == "null":
        return "None" in str(key.type)
    return (name, kind) in FITTING or (name in FREE_TEXT and kind not in NEVER)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("values")
    for name in ("image", "labels"):
        write_raster(path / f"{name}.tif", np.ones((1, 48, 48), np.uint8))
    return path


@pytest.mark.parametrize(("group", "key"), KEYS, ids=lambda value: getattr(value, "name", value))
def test_a_key_refuses_what_it_cannot_hold(
    group: str, key: Field[Any], root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good, name, begun = good_config(root), f"{group}.{key.name}", time.monotonic()
    good["run"]["output"] = str(root / "out")
    tried, turn, before = 0, KEYS.index((group, key)) % 3, tree(root)
    # Every third value, in turn from key to key; each night all of them.
    for kind, text in VALUES.items() if NIGHTLY or name in FREE_TEXT else list(VALUES.items())[turn::3]:
        if may_hold(name, key, kind):
            continue
        write_yaml(root / "bad.yaml", {**good, group: {**good.get(group, {}), key.name: "VALUE"}})
        (root / "bad.yaml").write_text(re.sub(r"['\"]?VALUE['\"]?", lambda _: text, (root / "bad.yaml").read_text()))  # noqa: B023
        assert main(["--config", str(root / "bad.yaml")]) == 2, kind
        out, err = capfd.readouterr()
        assert (out, err[:7], err.count("\n"), err[-1]) == ("", "error: ", 1, "\n"), (kind, err)
        assert "unforeseen" not in err, (kind, err)
        assert key.name in err or "bad.yaml" in err, (kind, err)
        assert len(err) < 700, kind
        tried += 1
    (root / "bad.yaml").unlink(missing_ok=True)
    assert tree(root) == before
    assert tried >= (3 if NIGHTLY else 1)
    assert time.monotonic() - begun < 120


def test_every_number_has_a_range() -> None:
    """Declared beside the field; without one, nothing would stop a size beyond what memory or an index can hold."""
    numeric = [(group, key) for group, key in KEYS if re.search(r"\b(int|float)\b", str(key.type))]
    assert len(numeric) >= 27
    assert len(KEYS) <= 100, "a key that one word alone knows is a field of that word"
    assert [f"{group}.{key.name}" for group, key in numeric if range_of(key) is None] == []
    whole = [key for _, key in numeric if "int" in str(key.type) and "float" not in str(key.type)]  # keys of a map
    assert all(range_of(key).whole and range_of(key).most < 2**63 for key in whole)  # type: ignore[union-attr]


@pytest.mark.parametrize(("group", "key"), KEYS, ids=lambda value: getattr(value, "name", value))
def test_the_ends_of_a_range(group: str, key: Field[Any]) -> None:
    """Both ends are in it unless it says otherwise; what lies beyond is refused, with key, value and remedy."""
    allowed = range_of(key)
    if allowed is None:
        pytest.skip("no number")
    values = GROUPS[group]()  # type: ignore[operator]
    steps = 1 if allowed.whole else 1e-9
    inside = [] if allowed.above else [allowed.least]
    inside += [] if allowed.below else [allowed.most]
    beyond = [allowed.least] if allowed.above else [allowed.least - steps]
    beyond += [allowed.most] if allowed.below else [allowed.most + max(steps, abs(allowed.most) * 1e-9)]
    for value in inside:
        setattr(values, key.name, value)
        check_values(group, values)
    for value in (v if not allowed.whole else int(v) for v in beyond if not math.isinf(v)):
        setattr(values, key.name, value)
        with pytest.raises(ConfigError, match=re.escape(f"{group}.{key.name} is {value}; give ")):
            check_values(group, values)


def test_what_yaml_cannot_say() -> None:
    """Values of a caller in Python: no whole numbers, and names that are no text."""
    for value in (True, 3.0, "3", [True]):
        with pytest.raises(ConfigError, match=r"model\.levels is .*whole number"):
            check_values("model", ModelConfig(levels=value))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model\.name is .*not text in UTF-8"):
        check_values("model", ModelConfig(name="\udcff"))
