"""The help of configuration keys: default, range and an example, for `tiledseg train --help` and the reference."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any

import yaml

from tiledseg.config.checks import range_of
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
EXAMPLES: dict[str, Any] = {
    "data.images": "scenes/*.tif",
    "data.labels": "labels/{stem}_classes.tif",
    "data.val_images": "held-out.tif",
    "data.val_labels": "held-out-labels.tif",
    "data.classes": [{"name": "field"}, {"name": "road", "colour": "#46464a", "values": [7, 8]}],
    "data.label_layer": "parcels",
    "data.label_attribute": "landuse",
    "data.background": "field",
    "data.area": "area.gpkg",
    "data.split": "512 px",
    "data.split_gap": "30 m",
    "data.nodata": 0,
    "data.bands": [1, 2, 3],
    "data.normalize": "imagenet",
    "tiling.grid": [8, 6],
    "tiling.halo": 96,
    "model.name": "residual_unet",
    "model.norm": "batch",
    "model.upsampling": "bilinear",
    "model.dropout": 0.1,
    "model.encoder": "resnet50",
    "model.pretrained": "resnet34.pth",
    "model.build": "mynets.unet:build",
    "model.arguments": {"width": 32},
    "parallel.halo": "layer",
    "parallel.mesh": [2, 2],
    "parallel.fusion": "auto",
    "parallel.stages": 4,
    "parallel.balance": [18, 30, 44, 30],
    "parallel.micro_batches": 16,
    "parallel.recompute": "except_last",
    "parallel.transport": "mpi",
    "parallel.deadline": 600,
    "parallel.machine": "h100",
    "parallel.auto": ["tiling.grid", "parallel.halo"],
    "memory.budget": "16GiB",
    "memory.recompute": "compact",
    "memory.offload": "auto",
    "memory.blocks": [4, 4],
    "memory.store": "/scratch",
    "optimizer.name": "sgd",
    "optimizer.lr_factors": {"encoder": 0.1},
    "optimizer.policy": "cosine",
    "optimizer.warmup_steps": 500,
    "optimizer.clip_norm": 1.0,
    "train.epochs": 20,
    "train.tiles_per_step": 16,
    "train.loss": {"cross_entropy": 1, "dice": 1},
    "train.ema": 0.999,
    "train.best": "mean_iou",
    "train.early_stop": 20,
    "train.largest_loss": 100.0,
    "train.class_weights": "median_frequency",
    "train.tiles_per_batch": 2,
    "train.compile": "on",
    "train.precision": "bf16",
    "train.resume": "runs/first/checkpoints/step-000100",
    "train.sampling": "windows",
    "train.window": 512,
    "train.windows_per_step": 16,
    "train.window_halo": "none",
    "train.balance_classes": 0.5,
    "train.augment": ["reflect", {"rotate": 30}],
    "train.augment_each": "tile",
    "run.output": "runs/first",
}
"""Values to show where the default tells little; of other keys the default is the example."""


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
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    return _yaml(value)


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
    value = EXAMPLES[key] if key in EXAMPLES else KEYS[key].default
    return _yaml({group: {name: value}})[1:-1]


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 30, sort_keys=False, allow_unicode=True)
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
