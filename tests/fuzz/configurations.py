"""Configurations: other values, and files damaged as text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml

from tests.fuzz.files import damage_bytes
from tests.fuzz.process import Outcome
from tests.fuzz.trial import Trial, finished_run, good_config

SAFE = {  # values that a run of a second can have
    "model.levels": (1, 2, 3), "model.kernel": (1, 3, 5), "model.base_channels": (1, 2, 3, 8), "train.epochs": (1, 2),
    "model.convs_per_level": (1, 2), "tiling.grid": (1, 2, "auto", [1, 2]), "tiling.halo": ("auto", 8, 40),
    "model.norm": ("none", "pixel", "group", "instance"), "model.padding": ("same", "valid"),
    "model.upsampling": ("transposed", "nearest", "bilinear"), "model.dropout": (0.0, 0.3),
    "optimizer.name": ("adamw", "sgd"), "optimizer.policy": ("constant", "step", "polynomial", "cosine"),
    "train.precision": ("fp32", "bf16", "fp16", "fp64"), "train.seed": (0, 1, 2**63 - 1),
    "data.bands": (None, [1], [3, 1]),
    "train.tiles_per_step": (1, 2, 4, None),
    "data.classes": (3, 4, [{"name": "a", "values": [0, 1]}, {"name": "b", "value": 2}]),
    "parallel.halo": ("read", "exchange", "layer"), "data.normalize": (True, False),
}  # fmt: skip


def draw_trial(draw: random.Random, folder: Path) -> Trial:
    """Up to three keys get other values of a run that can be made; in two of five cases the text itself is damaged.

    `tests/test_config_values.py` gives every key values that it cannot hold."""
    values = good_config()
    values["run"]["output"] = "out"
    words, damages = [], draw.random() < 0.4
    for name in draw.sample(list(SAFE), draw.choice((1, 1, 2, 3))):
        group, _, key = name.partition(".")
        values.setdefault(group, {})[key] = draw.choice(SAFE[name])
        words.append(f"{name}={str(values[group][key])[:40]}")
    text: str | bytes = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    if damages:
        text, damaged = _damage_text(str(text), draw)
        words.append(damaged)
    (folder / "bad.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    arguments = [
        "--config",
        "bad.yaml",
        "--run.output",
        "out",
        *(["--train.epochs", "1"] if draw.random() < 0.2 else []),
    ]
    return Trial("train", arguments, ", ".join(words), ("out",), _check)


def _damage_text(text: str, draw: random.Random) -> tuple[str | bytes, str]:
    lines = text.splitlines(keepends=True)
    place = draw.randrange(len(lines))
    match draw.randrange(8):
        case 0:
            return _bounded(damage_bytes(text.encode(), draw)), "damaged bytes"
        case 1:
            return "".join([*lines[:place], lines[place], *lines[place:]]), "a line twice"
        case 2:
            return text + text, "everything twice"
        case 3:
            return text.replace(": ", ": &a ", 1) + "run2: *a\n", "an alias"
        case 4:
            return "".join([*lines[:place], f"  {lines[place]}", *lines[place + 1 :]]), "a line indented"
        case 5:
            return text + "extra: " + "[" * draw.choice((5, 40, 3000)) + "\n", "nesting"
        case 6:
            return "".join(lines[:place] + lines[place + 1 :]), "a line lost"
        case _:
            return text.encode("utf-16"), "another encoding"


def _bounded(data: bytes) -> bytes:
    """A flipped digit may ask for a run of hours, which is no hang."""
    return data if b"epochs: 2" in data and b"base_channels: 2" in data else data[: len(data) // 2]


def _check(folder: Path, outcome: Outcome) -> list[str]:
    """A run that ends well has done all its epochs, and its config.yaml says what it was told."""
    faults = finished_run(folder, "out")
    if faults:
        return faults
    told = yaml.safe_load((folder / "bad.yaml").read_text())
    kept = yaml.safe_load((folder / "out" / "config.yaml").read_text())
    for group, keys in told.items():
        for key, value in (keys or {}).items():
            if (group, key) not in (("run", "output"), ("train", "epochs")) and not _alike(kept[group][key], value):
                faults.append(f"config.yaml says {group}.{key} is {kept[group][key]!r}, but it was told {value!r}")
    return faults


def _alike(kept: Any, told: Any) -> bool:
    """One value as YAML reads it twice: NaN equals NaN, 1 equals 1.0, and `1e3`, which YAML 1.1 takes for text, 1000.0.

    A text may stand for what is typed as text.
    """
    if kept is None and told == "null":  # text in YAML, as it is in a flag
        return True
    if isinstance(kept, float) and isinstance(told, str):
        return kept == float(told)
    return kept == told or str(kept) == str(told) or (kept != kept and told != told)
