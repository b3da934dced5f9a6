"""Words of the configuration that other rooms share: networks, losses, policies, scores, schedules, augmentations,
and formats of maps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tiledseg.config.checks import AUTO, MOST, Group, Range, check_fields, number, one_of, shown
from tiledseg.errors import ConfigError

SYSTEMS = ("slurm", "lsf")  # of batch jobs
PADDINGS = ("same", "valid")
UPSAMPLINGS = ("transposed", "nearest", "bilinear")
NORMS = ("none", "pixel", "instance", "group", "batch")
ENCODERS = ("resnet18", "resnet34", "resnet50", "wide38")  # a network takes some of them
NETWORKS = ("unet", "segnet", "residual_unet", "gated_scnn")
PRESET_NAMES = ("small", "medium-2", "large")
CROSS_ENTROPY, FOCAL, DICE, TVERSKY, BOUNDARY = LOSSES = ("cross_entropy", "focal", "dice", "tversky", "boundary")
EDGES = "edges"
Fields = dict[str, tuple[float, Range]]
LOSS_FIELDS: dict[str, Fields] = {
    CROSS_ENTROPY: {"smoothing": (0.0, Range(0.0, 1.0, below=True))},
    FOCAL: {"gamma": (2.0, Range(0.0, 100.0))},
    DICE: {},
    TVERSKY: {"alpha": (0.3, Range(0.0, 1e3)), "beta": (0.7, Range(0.0, 1e3, above=True))},
    BOUNDARY: {"radius": (8, Range(1, 64))},
    EDGES: {
        "weight": (20.0, Range(0.0, 1e6)),
        "balance": (0.9, Range(0.0, 1.0)),
        "radius": (2, Range(1, 64)),
        "attention": (1.0, Range(0.0, 1e6)),
        "dual": (1.0, Range(0.0, 1e6)),
    },
}
"""The fields of each loss with their defaults and ranges; `edges` is the loss of a network that gives edges."""
_WEIGHT: Fields = {"weight": (1.0, Range(0.0, 1e6, above=True))}
CONSTANT, STEP, POLYNOMIAL, COSINE = ("constant", "step", "polynomial", "cosine")
POLICY_FIELDS: dict[str, Fields] = {
    CONSTANT: {},
    STEP: {"size": (20, Range(1, MOST)), "gamma": (0.1, Range(0.0, 1.0, above=True))},
    POLYNOMIAL: {"power": (0.9, Range(0.0, 1e3, above=True))},
    COSINE: {},
}
"""The fields of each learning-rate policy: `size`, epochs between drops, and `gamma`, the factor of a drop; `power`."""
MOVED = {
    "train.label_smoothing": ("train.loss", CROSS_ENTROPY, "smoothing"),
    "train.focal_gamma": ("train.loss", FOCAL, "gamma"),
    "train.tversky_alpha": ("train.loss", TVERSKY, "alpha"),
    "train.tversky_beta": ("train.loss", TVERSKY, "beta"),
    "train.boundary_radius": ("train.loss", BOUNDARY, "radius"),
    "train.edge_weight": ("train.loss", EDGES, "weight"),
    "train.edge_balance": ("train.loss", EDGES, "balance"),
    "train.edge_radius": ("train.loss", EDGES, "radius"),
    "train.attention_weight": ("train.loss", EDGES, "attention"),
    "train.dual_weight": ("train.loss", EDGES, "dual"),
    "optimizer.step_size": ("optimizer.policy", STEP, "size"),
    "optimizer.gamma": ("optimizer.policy", STEP, "gamma"),
    "optimizer.power": ("optimizer.policy", POLYNOMIAL, "power"),
    "train.sampling": ("train.windows", "", "size"),
    "train.window": ("train.windows", "", "size"),
    "train.windows_per_step": ("train.windows", "", "per_step"),
    "train.window_halo": ("train.windows", "", "halo"),
    **{f"data.split_{field}": ("data.split", "", field) for field in ("share", "gap", "seed")},
    **{f"model.{field}": ("model.arguments", "", field) for field in ("image_mean", "edge_band")},
    "data.prefetch": ("data.workers", "", ""),
    **dict.fromkeys(("data.warp_images", "run.panels", "parallel.auto"), ("", "", "")),
}
"""Keys of older versions, each with the key, the loss or policy, and the field that replaces it."""
_USUAL = {"share": 0.2, "gap": "auto", "seed": 0, "halo": "exact", "image_mean": True, "edge_band": False}


def _with_defaults(where: str, name: str, given: Mapping[str, Any], known: Fields) -> dict[str, float]:
    """Return all fields of a loss or a policy. Raise ConfigError for an unknown field, or a number out of range."""
    for field, value in check_fields(f"{where}: {name}", given, known).items():
        known[field][1].check(f"{where}: {name}.{field}", value)
    return {field: given.get(field, default) for field, (default, _) in known.items()}


def read_loss(loss: str | Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the fields of each loss of `focal`, `{name: focal, gamma: 2}` or `{dice: 1, focal: {weight: 2}}`; `edges`
    always among them. Raise ConfigError for an unknown loss or field, or a number out of range."""
    terms: Mapping[str, Any] = {loss: {}} if isinstance(loss, str) else loss
    if isinstance(loss, Mapping) and "name" in loss:
        terms = {loss["name"]: {key: value for key, value in loss.items() if key != "name"}}
    if not terms or not all(isinstance(name, str) and name in LOSS_FIELDS for name in terms):
        what = f"'{shown(loss)}'" if isinstance(loss, str) else shown(loss)
        raise ConfigError(f"train.loss is {what}; give one of {', '.join(LOSSES)}, or a map of some to their weights")
    if set(terms) == {EDGES}:
        terms = {CROSS_ENTROPY: {}, **terms}
    read = {}
    for name, value in {**terms, EDGES: terms.get(EDGES, {})}.items():
        known = LOSS_FIELDS[name] if name == EDGES else {**_WEIGHT, **LOSS_FIELDS[name]}
        given = value if isinstance(value, Mapping) else {"weight": value}
        read[name] = _with_defaults(f"train.loss is {shown(loss)}", name, given, known)
    return read


def read_policy(policy: str | Mapping[str, Any]) -> tuple[str, dict[str, float]]:
    """Return the name and the fields of `cosine` or `{name: step, size: 20, gamma: 0.1}`. Raise ConfigError for an
    unknown policy or field, or a number out of range."""
    given = {"name": policy} if isinstance(policy, str) else dict(policy)
    name = given.pop("name", shown(policy))
    one_of("optimizer.policy", str(name), tuple(POLICY_FIELDS))
    return name, _with_defaults(f"optimizer.policy is {shown(policy)}", name, given, POLICY_FIELDS[name])


def refuse_moved(keys: Iterable[str], where: str) -> None:
    """Raise ConfigError for keys "group.key" of an older version, with the new spelling of each."""
    old = [key for key in keys if key in MOVED]
    if old:
        news = (MOVED[each] for each in old if MOVED[each][0])
        words = [f"{key} {{{f'name: {name}, ' * bool(name)}{field}: VALUE}}" for key, name, field in news]
        give = f"give {', '.join(dict.fromkeys(words)).replace('{: VALUE}', 'VALUE')}, or " if words else ""
        raise ConfigError(f"{where} {', '.join(old)}, of an older version: {give}leave it out")


def without_moved(config: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the configuration of a checkpoint, its keys of an older version turned into fields."""
    groups = {group: dict(keys) for group, keys in config.items()}
    for old, (key, name, field) in MOVED.items():
        (group, _, last), whole = old.partition("."), key.partition(".")[2]
        value = groups.get(group, {}).pop(last, None)
        usual = (LOSS_FIELDS | POLICY_FIELDS)[name][field][0] if name else _USUAL.get(field)
        if not field or value in (None, usual, "tiles", "windows"):
            continue
        now: Any = groups[group].get(whole, CROSS_ENTROPY if name else {})
        if not name and now is not None:  # no split has no share
            groups[group][whole] = {**(now if isinstance(now, dict) else {"blocks": now}), field: value}
        elif key == "train.loss":
            terms = {now: {}} if isinstance(now, str) else now
            own = terms.get(name, {})
            own = own if isinstance(own, dict) else {"weight": own}
            groups[group][whole] = {**terms, name: {**own, field: value}}
        elif name and name == (now if isinstance(now, str) else now["name"]):
            groups[group][whole] = {"name": name, **({} if isinstance(now, str) else now), field: value}
    return groups


LOSS = "loss"
SCORES = ("mean_iou", "mean_f1", "accuracy", LOSS)
_OF_CLASS = "iou."
SCORE_WORDS = f"one of {', '.join(SCORES)}, {_OF_CLASS}CLASS"


def class_of(score: str) -> str | None:
    """Return the class of `iou.CLASS`; None for another score."""
    return score.removeprefix(_OF_CLASS) if score.startswith(_OF_CLASS) else None


Ranks = tuple[int, ...]

SCHEDULES = ("1f1b", "gpipe", "folded")
NEVER = "never"
RECOMPUTE = (NEVER, "except_last", "always")  # the micro-batches of which a stage keeps its inputs alone


def chunk_ranks(schedule: str, stages: int) -> Ranks:
    """Return the rank of each chunk. Raise ConfigError for an unknown schedule, or fewer than 1 stage."""
    one_of("the schedule", schedule, SCHEDULES)
    if stages < 1:
        raise ConfigError(f"the pipeline has {stages} stages; give at least 1")
    ranks = tuple(range(stages))
    return ranks + ranks[-2::-1] if schedule == "folded" else ranks


LARGEST_SHIFT = 2**20  # pixels
FACTORS = "[least, largest] factor, from 0.5 to 2, such as [0.8, 1.25]"


@dataclass(frozen=True)
class Augmentation(Group):
    """Changes that are drawn for each raster; by default none.

    `reflect`: (rows, columns) in reverse order, each in every other draw. `turn`: 90 for quarter turns, 180 for half
    ones, 0 for none. `translate`: pixels at most, along both dims. `scale`: the least and the largest factor. `rotate`:
    degrees at most, either way. `brightness`, `contrast`: largest offset, and largest change of the factor, of each
    band; `noise`: its standard deviation at each pixel; `drop_bands`: the probability that a band is 0. Offsets and
    noise are in units of the network's input: standard deviations of a band, where it is normalised.
    """

    reflect: tuple[bool, bool] = (False, False)
    turn: int = number(0, 0, 180, remedy="90 (quarter turns) or 180 (half turns)")
    translate: int = number(0, 0, LARGEST_SHIFT, remedy=f"a number of pixels, at most {LARGEST_SHIFT}")
    scale: tuple[float, float] = number((1.0, 1.0), 0.5, 2.0, remedy=FACTORS)
    rotate: float = number(0.0, 0.0, 180.0)
    brightness: float = number(0.0, 0.0, 1e6)
    contrast: float = number(0.0, 0.0, 1.0, below=True)
    noise: float = number(0.0, 0.0, 1e6)
    drop_bands: float = number(0.0, 0.0, 1.0, below=True)

    def check_together(self) -> None:
        if self.turn not in (0, 90, 180):
            raise ConfigError(f"train.augment: turn is {self.turn}; give 90 (quarter turns) or 180 (half turns)")
        if self.scale[0] > self.scale[1]:
            raise ConfigError(f"train.augment: scale is {list(self.scale)}; give {FACTORS}")

    @property
    def moves(self) -> bool:
        """Return True if pixels change their places."""
        turned = self.turn > 0 or self.rotate > 0
        return any(self.reflect) or turned or self.translate > 0 or self.scale != (1.0, 1.0)

    @property
    def reach(self) -> float:
        """Return the longest distance in the raster, along rows or columns, between neighbours of the augmented one."""
        angle = math.radians(min(self.rotate, 45.0))
        return (math.cos(angle) + math.sin(angle)) / self.scale[0]

    @property
    def recolours(self) -> bool:
        """Return True if pixels change their values."""
        return max(self.brightness, self.contrast, self.noise, self.drop_bands) > 0


def augmentation(entries: Sequence[Any]) -> Augmentation:
    """Return the value of a list such as `[{reflect: [row, col]}, turn, {scale: [0.8, 1.25]}]`. Raise ConfigError."""
    values: dict[str, Any] = {}
    for entry in entries:
        if not entry or not isinstance(entry, Mapping | str):
            raise ConfigError(f"train.augment has the entry {shown(entry)}; give a name, or a map of name to value")
        for name, value in [(entry, None)] if isinstance(entry, str) else entry.items():
            if name in values:
                raise ConfigError(f"train.augment has {name} twice; give it once")
            values[name] = value
    if "reflect" in values:
        value = values["reflect"]
        dims = ["row", "col"] if value is None else value if isinstance(value, list) else [value]
        if dims not in (["row"], ["col"], ["row", "col"], ["col", "row"]):
            raise ConfigError(f"train.augment: reflect is {shown(value)}; give row, col or [row, col]")
        values["reflect"] = "row" in dims, "col" in dims
    if "turn" in values and values["turn"] is None:
        values["turn"] = 90
    return Augmentation.of("train.augment", values)


COG, GTIFF, ZARR = FORMATS = ("cog", "gtiff", "zarr")
VIEWS = NO_VIEWS, REFLECTIONS, TURNS = ("none", "reflections", "turns")
"""The raster alone; it and its three reflections; these and their transposes, which are all quarter turns too."""

BLENDS, ENDS = ("gaussian", "cosine", "mean", "centre"), ("inside", "mirrored")
"""Ways to blend the crops of a map, and what lies beyond its image (`geometry.layers.declared.CropGrid`)."""

BLOCK = 512
"""Side of a block, pixels."""

_WORST = 1.02
"""A compressed file of noise, by its pixels' bytes."""

COMPRESSIONS = (AUTO, "deflate", "zstd", "none")


def _blocks(height: int, width: int) -> int:
    return -(-height // BLOCK) * -(-width // BLOCK)


@dataclass(frozen=True)
class Packing:
    """Format and compression of a raster. `compress` auto: deflate, which every program reads; `gtiff` is never
    compressed. `average`: overviews hold means of pixels, as shares need; others hold the most frequent value."""

    format: str = "cog"
    compress: str = AUTO
    average: bool = False

    def __post_init__(self) -> None:
        if self.format == GTIFF and self.compress not in (AUTO, "none"):
            raise ConfigError(f"--compress is {self.compress}, but --format gtiff is not compressed; use --format cog")

    def of_shares(self) -> Packing:
        """Return the packing of class probabilities. auto leaves float32 as it is, since its last bits are noise."""
        return replace(self, average=True, compress="none" if self.compress == AUTO else self.compress)

    @property
    def codec(self) -> str:
        """Return GDAL's name of the compression."""
        return "deflate" if self.compress == AUTO else self.compress

    @property
    def second_file(self) -> bool:
        """Return True if the plain file, whose pixels any rank can put in place, is packed into another one."""
        return self.format != GTIFF

    def bytes(self, height: int, width: int, pixel: int) -> int:
        """Return the most bytes of the disk: the plain file, the packed one, and GDAL's uncompressed overviews.
        `pixel`: bytes of a pixel with all bands."""
        plain, overviews = _blocks(height, width), 0
        while max(height, width) > BLOCK and self.format == "cog":  # each overview halves the one before
            height, width = -(-height // 2), -(-width // 2)
            overviews += _blocks(height, width)
        packed = _WORST * (plain + overviews) + overviews if self.second_file else 0
        return math.ceil((plain + packed) * BLOCK * BLOCK * pixel)


PLAIN = Packing(GTIFF)
