"""The help of configuration keys: default, range and an example, for `tiledseg train --help` and the reference."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from functools import cache
from numbers import Integral, Real
from typing import Any

import yaml

from tiledseg.config.checks import default_of, range_of, shown
from tiledseg.config.run import Config
from tiledseg.errors import ConfigError

GROUPS: dict[str, Any] = {group.name: group.default_factory for group in fields(Config)}
KEYS = {f"{name}.{field.name}": field for name, kind in GROUPS.items() for field in fields(kind)}
"""All keys of the configuration."""
MAIN = (
    *("data.images", "data.labels", "data.val_images", "data.val_labels", "data.classes", "data.split"),
    *("tiling.grid", "model.name", "model.levels", "model.base_channels", "model.norm", "model.build"),
    *("parallel.halo", "parallel.stages", "memory.budget", "optimizer.lr", "optimizer.policy"),
    *("train.epochs", "train.tiles_per_step", "train.loss", "train.precision", "run.output"),
)
"""Keys that `--help` shows; `--help all` shows the others too."""
_EXAMPLES = """
data: {images: scenes/*.tif, labels: "labels/{stem}_classes.tif", val_images: held-out.tif,
  val_labels: held-out-labels.tif, label_layer: parcels, label_attribute: landuse, background: field,
  area: area.gpkg, classes: [{name: field}, {name: road, colour: "#46464a", values: [7, 8]}],
  split: 512 px, split_gap: 30 m, nodata: 0, bands: [1, 2, 3], normalize: imagenet}
tiling: {grid: [8, 6], halo: 96}
model: {name: residual_unet, norm: batch, upsampling: bilinear, dropout: 0.1, encoder: resnet50,
  pretrained: resnet34.pth, build: "mynets.unet:build", arguments: {width: 32}}
parallel: {halo: layer, mesh: [2, 2], fusion: auto, stages: 4, balance: [18, 30, 44, 30], micro_batches: 16,
  recompute: except_last, transport: mpi, deadline: 600, machine: h100, auto: [tiling.grid, parallel.halo]}
memory: {budget: 16GiB, recompute: compact, offload: auto, blocks: [4, 4], store: /scratch}
optimizer: {name: sgd, lr_factors: {encoder: 0.1}, policy: cosine, warmup_steps: 500, clip_norm: 1.0}
train: {epochs: 20, tiles_per_step: 16, loss: {cross_entropy: 1, dice: 1}, ema: 0.999, best: mean_iou,
  early_stop: 20, largest_loss: 100.0, class_weights: median_frequency, tiles_per_batch: 2, compile: "on",
  precision: bf16, resume: runs/first/checkpoints/step-000100, sampling: windows, window: 512,
  windows_per_step: 16, window_halo: none, balance_classes: 0.5, augment: [reflect, {rotate: 30}],
  augment_each: tile}
run: {output: runs/first}
"""
"""Values to show where the default tells little; of other keys the default is the example."""


@cache
def _examples() -> Mapping[str, Mapping[str, Any]]:
    groups: Mapping[str, Mapping[str, Any]] = yaml.safe_load(_EXAMPLES)
    return groups


@cache
def meanings(group: str) -> dict[str, str]:
    """Return the meaning of each key of a group, from the docstring of its class."""
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", GROUPS[group].__doc__ or "", re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in entries}


def meaning(key: str) -> str:
    """Return the meaning of a key in a sentence or two."""
    group, _, name = key.partition(".")
    return meanings(group)[name]


def default(field: Field[Any]) -> str:
    """Return the default of a key as YAML writes it."""
    return as_yaml(default_of(field))


def takes(field: Field[Any]) -> str:
    """Return the words, or the range of numbers, that a key takes; its type where it has neither."""
    words, allowed = field.metadata.get("words"), range_of(field)
    if words:
        return ", ".join(words)
    if allowed is None:
        return str(field.type).replace("None", "null")
    return allowed.in_words


def example(key: str) -> str:
    """Return a line of YAML with the key, as a configuration file has it."""
    group, _, name = key.partition(".")
    return as_yaml({group: {name: _examples()[group].get(name, KEYS[key].default)}})[1:-1]


class _Dumper(yaml.SafeDumper):
    """A writer without anchors, which configurations refuse."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _other(dumper: _Dumper, data: object) -> yaml.Node:
    """Write a number of another library, or a path. Raise ConfigError for anything else."""
    if isinstance(data, Integral | Real):
        number = int(data) if isinstance(data, Integral) else float(data)
        return dumper.represent_data(number)
    if isinstance(data, os.PathLike):
        return dumper.represent_data(str(os.fspath(data)))
    raise ConfigError(f"{shown(data)} is of the type {type(data).__name__}; give numbers, text, lists and maps")


_Dumper.add_representer(None, _other)  # type: ignore[arg-type]  # of types that YAML does not know


def as_yaml(value: Any) -> str:
    """Return a value as one line of YAML."""
    style: dict[str, Any] = {"default_flow_style": True, "width": 1 << 30, "sort_keys": False, "allow_unicode": True}
    text: str = yaml.dump(value, Dumper=_Dumper, **style)
    return text.removesuffix("...\n").strip()


def help_of_key(key: str) -> str:
    """Return the help of one key on 80 columns: meaning, default, values and an example."""
    field = KEYS[key]
    rows = ("default", default(field)), ("takes", takes(field)), ("example", example(key))
    return "\n".join([textwrap.fill(f"{key}: {meaning(key)}", 80), *(f"  {name:8} {text}" for name, text in rows)])


def keys_to_show(words: Sequence[str]) -> Sequence[str] | None:
    """Return the keys whose help `--help`, `--help all`, `--help GROUP` or `--help GROUP.KEY` asks for; None without
    `--help`. Raise ConfigError for another word after it."""
    asking = [place for place, word in enumerate(words) if word in ("-h", "--help")]
    if not asking:
        return None
    after = words[asking[0] + 1 : asking[0] + 2]
    topic = after[0].removeprefix("--") if after else ""
    if topic in ("", "all") or (topic not in GROUPS and topic not in KEYS and after[0].startswith("-")):
        return tuple(KEYS) if topic == "all" else MAIN
    chosen = [key for key in KEYS if topic in (key, key.partition(".")[0])]
    if not chosen:
        raise ConfigError(f"--help has no '{topic}'; give all, a group ({', '.join(GROUPS)}) or a key, as data.classes")
    return chosen
