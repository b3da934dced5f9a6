"""The options of commands: flags, configuration keys as flags, and `--config FILE` with the same options.

`add_keys` makes flags of keys, with help from the group's docstring; `parse` reads words and files, and later ones win;
`config_of` builds the configuration. A value of a key is YAML. `help_of_key` gives default, range and an example, for
`train --help` and the reference.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from functools import cache
from inspect import getdoc
from typing import Any, get_type_hints

import yaml

from tiledseg.commands.parser import Parser, flag_of
from tiledseg.config.checks import check_fields, check_value, convert, default_of, in_words, range_of, shown
from tiledseg.config.run import Config
from tiledseg.config.words import refuse_moved
from tiledseg.errors import ConfigError
from tiledseg.user_files.yaml_text import ambiguity, load_value, read_yaml

GROUPS: dict[str, Any] = {group.name: group.default_factory for group in fields(Config)}
KEYS = {f"{name}.{field.name}": field for name, kind in GROUPS.items() for field in fields(kind)}
"""All keys of the configuration."""
MAIN = (
    *("data.images", "data.labels", "data.val_images", "data.val_labels", "data.classes", "data.split"),
    *("tiling.grid", "model.name", "model.levels", "model.base_channels", "model.build"),
    *("parallel.halo", "parallel.stages", "memory.budget", "optimizer.lr"),
    *("train.epochs", "train.tiles_per_step", "train.loss", "train.precision", "run.output"),
)
"""Keys shown by `--help`; `--help all` shows all."""
MODEL_KEYS = (
    *("model.levels", "model.convs_per_level", "model.kernel", "model.base_channels", "model.padding", "model.norm"),
    *("model.upsampling", "model.encoder", "model.build", "model.series", "model.arguments"),
)
PIPELINE_KEYS = ("parallel.stages", "parallel.balance", "parallel.micro_batches", "parallel.schedule")
"""Keys that are flags of `plan` too."""
_EXAMPLES = """
data: {images: scenes/*.tif, labels: "labels/{stem}_classes.tif", val_images: held-out.tif,
  val_labels: held-out-labels.tif, label_layer: parcels, label_attribute: landuse, background: field,
  area: area.gpkg, classes: [{name: field}, {name: road, colour: "#46464a", values: [7, 8]}],
  split: {blocks: 512 px, gap: 64}, nodata: 0, bands: [1, 2, 3], normalize: imagenet, assets: [red, green, nir],
  times: ["2024-04", "2024-06"], valid: "clouds/{stem}.tif", valid_values: [4, 5]}
tiling: {grid: [8, 6], halo: 96}
model: {name: residual_unet, norm: batch, upsampling: bilinear, dropout: 0.1, encoder: resnet50,
  pretrained: resnet34.pth, build: "mynets.unet:build", arguments: {width: 32}, series: 3, window: 224}
parallel: {halo: layer, mesh: [2, 2], fusion: auto, stages: 4, balance: [18, 30, 44, 30], micro_batches: 16,
  recompute: except_last, transport: mpi, deadline: 600, machine: h100}
memory: {budget: 16GiB, recompute: all, offload: auto, blocks: [4, 4], store: /scratch}
optimizer: {name: sgd, lr_factors: {encoder: 0.1}, policy: cosine, warmup_steps: 500, clip_norm: 1.0}
train: {epochs: 20, tiles_per_step: 16, loss: {cross_entropy: 1, dice: 1}, ema: 0.999, best: mean_iou,
  early_stop: 20, largest_loss: 100.0, class_weights: median_frequency, tiles_per_batch: 2, compile: "on",
  precision: bf16, resume: runs/first/checkpoints/step-000100, windows: {size: 512, per_step: 16, halo: none},
  balance_classes: 0.5, augment: [reflect, {rotate: 30}], augment_each: tile}
run: {output: runs/first}
"""
"""Examples of keys whose default tells little; the example of any other key is its default."""


_examples = cache(lambda: yaml.safe_load(_EXAMPLES))


@cache
def _hints(group: str) -> dict[str, Any]:
    return get_type_hints(GROUPS[group])


@cache
def meaning(key: str) -> str:
    """Return the description of a key from the docstring of its group."""
    group, _, name = key.partition(".")
    entry = re.search(rf"^ {{4}}{name}: (.*(?:\n {{8}}.*)*)", getdoc(GROUPS[group]) or "", re.MULTILINE)
    return re.sub(r"\s+", " ", entry[1]) if entry else ""


def takes(key: str) -> str:
    """Return the words or the range of numbers that a key takes, else the kind of its value."""
    group, _, name = key.partition(".")
    words, allowed, kind = KEYS[key].metadata.get("words"), range_of(KEYS[key]), in_words(_hints(group)[name])
    if words:
        return ", ".join(words)
    if allowed is None:
        return kind
    number = "a whole number" if allowed.whole else "a number"
    return allowed.remedy or kind.replace(" or ", ", or ").replace(number, allowed.in_words)


def example(key: str) -> str:
    """Return a line of YAML with the key and an example value."""
    group, _, name = key.partition(".")
    return as_yaml({group: {name: _examples()[group].get(name, default_of(KEYS[key]))}})[1:-1]


def as_yaml(value: Any) -> str:
    """Return a value as one line of YAML."""
    style: dict[str, Any] = {"default_flow_style": True, "width": 1 << 30, "sort_keys": False, "allow_unicode": True}
    text: str = yaml.safe_dump(value, **style)
    return text.removesuffix("...\n").strip()


def help_of_key(key: str) -> str:
    """Return the help of one key on 80 columns: meaning, default, values and an example."""
    field = KEYS[key]
    rows = ("default", as_yaml(default_of(field))), ("takes", takes(key)), ("example", example(key))
    words = [(f"{key}: {meaning(key)}", ""), *((f"  {name:8} {text}", " " * 11) for name, text in rows)]
    return "\n".join(textwrap.fill(text, 80, subsequent_indent=other, break_on_hyphens=False) for text, other in words)


def keys_to_show(words: Sequence[str]) -> Sequence[str] | None:
    """Return the keys for `--help`, `--help all`, `--help GROUP` or `--help GROUP.KEY`; None without `--help`. Raise
    ConfigError for another word after it."""
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


def add_keys(parser: argparse._ActionsContainer, keys: Collection[str], plain: bool = False, **help: str) -> None:
    """Add a flag for each configuration key: `--group.key VALUE`, or `--key-name VALUE` if `plain`; the options have
    the plain ones by their keys, as `flags`. `help`: texts in place of the docstring's, by the last part of the key."""
    groups: dict[str, Any] = {}
    if plain:
        parser.set_defaults(flags={**parser.get_default("flags"), **{key: flag_of(key) for key in keys}})
    for key in keys:
        group, _, name = key.partition(".")
        if not plain and group not in groups:
            title = (GROUPS[group].__doc__ or "").partition("\n")[0]
            groups[group] = parser.add_argument_group(group, title)
        target = parser if plain else groups[group]
        text, default = help.get(name) or meaning(key).replace("%", "%%"), KEYS[key].default
        if default is not None and default is not MISSING and "default" not in text:
            text += f" (default: {str(default).lower() if isinstance(default, bool) else default})"
        flag, kind = flag_of(key) if plain else f"--{key}", _hints(group)[name]
        if plain and kind is bool:
            target.add_argument(flag, dest=key, action=argparse.BooleanOptionalAction, help=text)
        else:
            metavar = "VALUE" if plain else name.upper()
            target.add_argument(flag, dest=key, metavar=metavar, help=text)


def parse(parser: Parser, words: Sequence[str], given: Mapping[str, Any] | None = None) -> argparse.Namespace:
    """Return the options of flags and `--config` files; `config`: the names of the files. `given`: keyword arguments of
    Python, named like flags; None: left out.

    Raise ConfigError for an unknown key, a wrong value, or an unreadable file.
    """
    parser.add_argument(
        "--config", action=_ReadFile, default=[], metavar="FILE", help="YAML file of any of these options"
    )
    refuse_moved([word[2:].partition("=")[0] for word in words if word[:2] == "--"], "there is")
    parser.main = () if "all" in words else parser.main
    options = argparse.Namespace()
    give(parser, options, parser.prog, {name: each for name, each in (given or {}).items() if each is not None})
    return parser.parse_args(words, options)


class _ReadFile(argparse.Action):
    """`--config FILE`: the options of a file, at the place of its name, so that later words win."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, path: Any, option: str | None = None) -> None:
        namespace.config = [*namespace.config, path]
        give(parser, namespace, path, read_yaml(path))


def give(parser: Parser, options: argparse.Namespace, source: str, values: Any) -> None:
    """Set the options that `values`, of a file or of a Python program, name; with `_` where their flags have `-`."""
    actions = {
        name[2:].replace("-", "_"): action
        for action in parser._actions
        for name in action.option_strings
        if name[:2] == "--" and action.dest not in ("config", "help") and name[:5] != "--no-"
    }
    known: dict[str, list[str]] = {}
    for option in actions:
        group, _, key = option.partition(".")
        known.setdefault(group, []).extend([key] if key else [])
    groups = values if isinstance(values, Mapping) else {}
    names = [f"{group}.{key}" for group, keys in groups.items() if isinstance(keys, Mapping) for key in keys]
    refuse_moved(names, f"{source} has")
    for name, value in check_fields(source, values, known).items():
        own = {name: value}
        if known[name]:
            fields_of_group = check_fields(f"{source}: {name}", value, known[name])
            own = {f"{name}.{key}": each for key, each in fields_of_group.items()}
        for option, each in own.items():
            action = actions[option]
            action.required = False
            setattr(options, action.dest, _taken(parser, action, source, each))


def _taken(parser: Parser, action: argparse.Action, source: str, value: Any) -> Any:
    """Return the value of an option as its flag has it: a key's text is YAML."""
    if action.dest in KEYS:
        return as_yaml(value) if value is None or isinstance(value, str) else value
    option, is_list = action.option_strings[0][2:].replace("-", "_"), isinstance(value, list | tuple)
    if value is None:
        raise ConfigError(f"{source}: {option} is null; give a value, or leave it out")
    if isinstance(value, bool) != (action.nargs == 0) or (isinstance(value, list | dict) and action.type is str):
        wanted = "true or false" if action.nargs == 0 else "text"
        raise ConfigError(f"{source}: {option} is {shown(value)}; give {wanted}")
    if action.nargs == 0:
        return value
    text = f"[{','.join(map(str, value))}]" if is_list else str(value)
    try:
        values = [parser._get_value(action, each) for each in (map(str, value) if is_list and action.nargs else [text])]
        for each in values:
            parser._check_value(action, each)
    except argparse.ArgumentError as error:
        parser.error(str(error))
    return values if action.nargs else values[0]


def config_of(options: argparse.Namespace, **default: Any) -> Config:
    """Return the configuration of the options that are its keys. `default`: default values by group, in place of the
    configuration's own. Raise ConfigError for a value of a wrong kind."""
    values: dict[str, dict[str, Any]] = {group: dict(keys) for group, keys in default.items()}
    for key, text in vars(options).items():
        if key in KEYS and text is not None:
            group, _, name = key.partition(".")
            found = value_of(key, text, options.flags.get(key, key), f"(see {options.command} --help)")
            values.setdefault(group, {})[name] = found
    return Config(**{group: GROUPS[group](**keys) for group, keys in values.items()})


def value_of(key: str, text: Any, name: str, see: str = "") -> Any:
    """Return the value of a key from a flag's YAML, or from its text if the key takes text. `name`: of the key in
    messages."""
    group, _, last = key.partition(".")
    kind, value = _hints(group)[last], text
    if isinstance(text, str):
        if re.search("int|float", str(KEYS[key].type)) and (words := ambiguity(text)):
            raise ConfigError(f"--{name.removeprefix('--')} is {words}")
        value = load_value(text)
    is_no_text = isinstance(value, list | dict) or (value is None and text)
    for each in (value, value if is_no_text else text):
        try:
            converted = convert(each, kind)
        except TypeError:
            continue
        if name.startswith("--"):
            check_value(name, converted, KEYS[key])
        return converted
    raise ConfigError(f"{name} is {shown(value)}; give {in_words(kind)} {see}".rstrip())


def as_config(values: Mapping[str, Any]) -> Config:
    """Return the configuration of groups of keys. Raise ConfigError for an unknown key or a value of a wrong kind."""
    parser = Parser("tiledseg train")
    add_keys(parser, KEYS)
    options = parser.parse_args(())
    give(parser, options, "the configuration", values)
    return config_of(options)


def parse_config(
    words: Sequence[str], command: str, description: str, example: str = "", files: list[str] | None = None
) -> Config:
    """Return the configuration of flags and `--config` files, whose names `files` takes; later ones win. `--help`
    prints and exits 0. Raise ConfigError for an unknown key, a value of a wrong kind or an unreadable file."""
    usage = f"{command} [--config FILE] [--GROUP.KEY VALUE ...]"
    parser = Parser(command, example, description=description, usage=usage)
    help_of = keys_to_show(words)
    if help_of is not None:
        if len(help_of) == 1:
            parser.exit(0, help_of_key(help_of[0]))
        add_keys(parser, help_of)
        parser.epilog = f"--help all: {len(KEYS)} keys; --help data: a group; --help data.ignore_index: a key"
        parser.parse_args(["--help"])
    add_keys(parser, KEYS)
    options = parse(parser, words)
    if files is not None:
        files += options.config
    return config_of(options)


def to_yaml(config: Config) -> str:
    """Return every key with its value, in the order of the configuration."""
    return yaml.safe_dump(asdict(config), sort_keys=False)
