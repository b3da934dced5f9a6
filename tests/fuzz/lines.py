"""Command lines: options of six commands with values of all kinds, given twice, left out, or unknown."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.fuzz.files import LAST
from tests.fuzz.process import Outcome
from tests.fuzz.trial import PREDICT, STORE, Trial, same_file

NUMBERS = ("0", "1", "2", "3", "-1", "2147483648", "9" * 40, "1e9", "nan", "1.5", "0x10", "", " 2", "many", "\0", "²")
OUTPUTS = ("nowhere.tif", "é", "", ".", "/dev/zero", "image.tif", "run", "run/new.tif", "sub/../map.tif", "no/map.tif")
FILES = ("image.tif", "labels.tif", "store.h5", "run.yaml", "run", "nowhere.tif", "", ".", "/dev/zero", "store.h5#0")
WORDS = ("auto", "none", "same", "valid", "fp32", "bf16", "mpi", "gloo", "nccl", "read", "layer", "true", "[2,2]")
PLAN = {
    "size": NUMBERS, "grid": ("1", "2", "8", "auto", *NUMBERS), "bands": NUMBERS, "classes": NUMBERS, "levels": NUMBERS,
    "convs-per-level": NUMBERS, "kernel": NUMBERS, "base-channels": NUMBERS, "stride": NUMBERS, "images": NUMBERS,
    "padding": WORDS, "norm": ("group", "instance", *WORDS), "precision": WORDS,
    "gpu-memory": ("16GiB", "1MiB", *NUMBERS),
    "gpus": NUMBERS, "gpus-per-node": NUMBERS, "mesh": NUMBERS, "flops": ("10T", *NUMBERS), "latency": NUMBERS,
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


def draw_trial(draw: random.Random, folder: Path) -> Trial:
    """One of the commands; `predict` half of the time with options that must not change the map."""
    return draw.choice((_plan, _plan, _predict, _speed, _tile, _evaluate, _scene, _doctor))(draw)


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


def _tile(draw: random.Random) -> Trial:
    known = {"grid": NUMBERS, "halo": ("auto", *NUMBERS), "levels": NUMBERS, "kernel": NUMBERS, "bands": NUMBERS,
             "nodata": NUMBERS, "images": FILES, "labels": FILES, "config": FILES, "padding": WORDS}  # fmt: skip
    words = _options(draw, known, 3)
    return Trial("tile", [*STORE, "--output", "new.h5", *words], str(words), ("new.h5",), _exists("new.h5"))


def _evaluate(draw: random.Random) -> Trial:
    known = {"prediction": FILES, "labels": FILES,
             "classes": ("3", '[{"name": "a", "value": 0}, {"name": "b", "value": 1}]', *NUMBERS),
             "ignore-index": NUMBERS, "image": FILES}  # fmt: skip
    words = ["--prediction", LAST, "--labels", "labels.tif", *_options(draw, known, 2), "--format", "json"]
    return Trial("evaluate", words, str(words), (), _json)


def _scene(draw: random.Random) -> Trial:
    known = {"bands": NUMBERS, "seed": NUMBERS, "workers": NUMBERS}
    words = ["--size", draw.choice(("20", "0", "-1", "9" * 30)), "16", *_options(draw, known, 3)]
    files = ["--image", "scene.tif", "--labels", "classes.tif"]
    return Trial("scene", [*files, *words], str(words), ("scene.tif", "classes.tif"), _exists("classes.tif"))


def _doctor(draw: random.Random) -> Trial:
    words = [*_options(draw, {"transport": ("mpi", "gloo", *WORDS[:5])}, 1), "--format", "json"]
    return Trial("doctor", words, str(words), (), _json)


def _exists(name: str) -> Callable[[Path, Outcome], list[str]]:
    def check(folder: Path, outcome: Outcome) -> list[str]:
        made = (folder / name).exists() or outcome.out.startswith("usage:")
        return [] if made else [f"exit 0 without {name}"]

    return check
