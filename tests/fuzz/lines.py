"""Configurations and command lines: other values, damaged text; options of six commands with values of all kinds, given
twice, left out, or unknown.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.fuzz.files import LAST, damage_bytes
from tests.fuzz.process import Outcome
from tests.fuzz.trial import PREDICT, STORE, Trial, finished_run, good_config, same_file

Check = Callable[[Path, Outcome], list[str]]
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


def draw_configuration(draw: random.Random, folder: Path) -> Trial:
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
    arguments = ["--config", "bad.yaml", "--run.output", "out"] + ["--train.epochs", "1"] * (draw.random() < 0.2)
    return Trial("train", arguments, ", ".join(words), ("out",), _check_run)


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


def _check_run(folder: Path, outcome: Outcome) -> list[str]:
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


NUMBERS = ("0", "1", "2", "3", "-1", "2147483648", "9" * 40, "1e9", "nan", "1.5", "0x10", "", " 2", "many", "\0", "²")
OUTPUTS = ("nowhere.tif", "é", "", ".", "/dev/zero", "image.tif", "run", "run/new.tif", "sub/../map.tif", "no/map.tif")
FILES = ("image.tif", "labels.tif", "store.h5", "run.yaml", "run", "nowhere.tif", "", ".", "/dev/zero", "store.h5#0")
WORDS = ("auto", "none", "same", "valid", "fp32", "bf16", "mpi", "gloo", "nccl", "read", "layer", "true", "[2,2]")
PLAN = {
    "size": NUMBERS, "grid": ("1", "2", "8", "auto", *NUMBERS), "bands": NUMBERS, "classes": NUMBERS, "levels": NUMBERS,
    "convs-per-level": NUMBERS, "kernel": NUMBERS, "base-channels": NUMBERS, "stride": NUMBERS, "images": NUMBERS,
    "padding": WORDS, "norm": ("group", "instance", *WORDS), "precision": WORDS,
    "gpu-memory": ("16GiB", "1MiB", *NUMBERS),
    "gpus": NUMBERS, "gpus-per-node": NUMBERS, "mesh": NUMBERS,
    "bandwidth": ("10GB", *NUMBERS), "stages": ("2", "4", *NUMBERS), "balance": ("auto", "[1,2]", *NUMBERS),
    "micro-batches": NUMBERS, "schedule": ("gpipe", *WORDS), "recompute": ("always", *WORDS),
    "model": ("small", *WORDS),
}  # fmt: skip
# Options that change speed and memory, never the map.
SPEED = {
    "tiling.grid": ("1", "2", "3", "[1,2]", "auto"), "workers": ("1", "2"), "verbosity": ("0", "1"),
    "parallel.halo": ("read", "exchange", "layer"), "parallel.transport": ("auto", "mpi"),
}  # fmt: skip
ANY = {"checkpoint": FILES, "image": FILES, "output": OUTPUTS, "precision": WORDS, "parallel.fusion": NUMBERS,
       "parallel.stages": NUMBERS, "parallel.mesh": WORDS, "parallel.balance": NUMBERS,
       "probabilities": OUTPUTS}  # fmt: skip


def draw_line(draw: random.Random, folder: Path) -> Trial:
    """One of the commands; `predict` half of the time with options that must not change the map."""
    return draw.choice((_plan, _predict, _speed, _other))(draw)


def _options(draw: random.Random, known: Mapping[str, tuple[str, ...]], most: int) -> list[str]:
    words: list[str] = []
    for name in draw.sample(list(known), min(len(known), draw.randrange(1, most + 1))):
        value = draw.choice(known[name])
        words += [f"--{name}={value}"] if draw.random() < 0.3 else [f"--{name}", value]
    if draw.random() < 0.08:
        words += [draw.choice(("--unknown", "stray", "--", "-h", "--help", "@x", "--size"))]
    return words


def _plan(draw: random.Random) -> Trial:
    words = ["--size", draw.choice(("64", "1000", "1000 600", "100000")), *_options(draw, PLAN, 4), "--format", "json"]
    parts = [part for word in words for part in (word.split(" ") if word else [word])]
    return Trial("plan", parts, str(words), (), _json)


def _json(folder: Path, outcome: Outcome) -> list[str]:
    if outcome.out.startswith("usage:"):
        return []
    try:
        return [] if json.loads(outcome.out) else ["exit 0 without an answer"]
    except ValueError:
        return ["exit 0, but the answer is no JSON"]


def _predict(draw: random.Random) -> Trial:
    words = _options(draw, {**SPEED, **ANY}, 3)
    inputs = _last([*PREDICT, *words], "checkpoint", "image")
    outputs = tuple(_last([*PREDICT, *words], "output", "probabilities") - inputs - {"", ".", "run"})
    return Trial("predict", [*PREDICT, *words], str(words), outputs)


def _last(words: list[str], *names: str) -> set[str]:
    """The values of these options that count: of each, the last one."""
    found = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.removeprefix("--") in names and name.startswith("--"):
            found[name] = value if equals else after
    return set(found.values())


def _speed(draw: random.Random) -> Trial:
    """The law: however the image is cut, the map is the same."""
    words = [word for word in _options(draw, SPEED, 3) if not word.startswith(("--unknown", "stray", "--help", "@"))]

    def check(folder: Path, outcome: Outcome) -> list[str]:
        return [] if outcome.out.startswith("usage:") else same_file(folder, "map.tif", (LAST,))

    return Trial("predict", [*PREDICT, *words], str(words), ("map.tif",), check)


def _exists(name: str) -> Check:
    return lambda folder, outcome: (
        [] if (folder / name).exists() or outcome.out.startswith("usage:") else [f"exit 0 without {name}"]
    )


OTHERS: dict[str, tuple[list[str], Mapping[str, tuple[str, ...]], int, tuple[str, ...], Check]] = {
    "tile": ([*STORE, "--output", "new.h5"], {
        "grid": NUMBERS, "halo": ("auto", *NUMBERS), "levels": NUMBERS, "kernel": NUMBERS, "bands": NUMBERS,
        "nodata": NUMBERS, "images": FILES, "labels": FILES, "config": FILES, "padding": WORDS,
    }, 3, ("new.h5",), _exists("new.h5")),
    "evaluate": (["--prediction", LAST, "--labels", "labels.tif", "--format", "json"], {
        "prediction": FILES, "labels": FILES, "ignore-index": NUMBERS, "image": FILES,
        "classes": ("3", '[{"name":"a","value":0},{"name":"b","value":1}]', *NUMBERS),
    }, 2, (), _json),
    "scene": (["--image", "scene.tif", "--labels", "classes.tif", "--size", "20", "16"], {
        "bands": NUMBERS, "seed": NUMBERS, "workers": NUMBERS, "size": ("0 16", "-1 16", f"{'9' * 30} 16"),
    }, 3, ("scene.tif", "classes.tif"), _exists("classes.tif")),
    "doctor": (["--format", "json"], {"transport": ("mpi", "gloo", *WORDS[:5])}, 1, (), _json),
}  # fmt: skip


def _other(draw: random.Random) -> Trial:
    command = draw.choice(list(OTHERS))
    good, known, most, outputs, check = OTHERS[command]
    words = [part for word in _options(draw, known, most) for part in (word.split(" ") if word.strip() else [word])]
    return Trial(command, [*good, *words], str(words), outputs, check)
