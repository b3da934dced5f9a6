"""Words of the configuration that other rooms share: losses, scores, schedules of pipelines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tiledseg.config.checks import Range, one_of, shown
from tiledseg.errors import ConfigError

CROSS_ENTROPY, FOCAL, DICE, TVERSKY, BOUNDARY = LOSSES = ("cross_entropy", "focal", "dice", "tversky", "boundary")
EDGES = "edges"
LOSS_FIELDS: dict[str, dict[str, tuple[float, Range]]] = {
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
_WEIGHT = {"weight": (1.0, Range(0.0, 1e6, above=True))}
MOVED = {
    "label_smoothing": (CROSS_ENTROPY, "smoothing"),
    "focal_gamma": (FOCAL, "gamma"),
    "tversky_alpha": (TVERSKY, "alpha"),
    "tversky_beta": (TVERSKY, "beta"),
    "boundary_radius": (BOUNDARY, "radius"),
    "edge_weight": (EDGES, "weight"),
    "edge_balance": (EDGES, "balance"),
    "edge_radius": (EDGES, "radius"),
    "attention_weight": (EDGES, "attention"),
    "dual_weight": (EDGES, "dual"),
}
"""Keys of the group `train` of older versions, each with the loss and the field that it is now."""


def read_loss(loss: str | Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the fields of each loss of `focal`, `{name: focal, gamma: 2}` or `{dice: 1, focal: {weight: 2}}`; `edges`
    always among them. Raises ConfigError for a loss or a field that there is not, or a value out of its range."""
    terms: Mapping[str, Any] = {loss: {}} if isinstance(loss, str) else loss
    if isinstance(loss, Mapping) and "name" in loss:
        terms = {loss["name"]: {key: value for key, value in loss.items() if key != "name"}}
    if not terms or not all(isinstance(name, str) and name in LOSS_FIELDS for name in terms):
        what = f"'{shown(loss)}'" if isinstance(loss, str) else shown(loss)
        raise ConfigError(
            f"train.loss is {what}; give one of {', '.join(LOSSES)}, or a map of some to what each counts"
        )
    if set(terms) == {EDGES}:
        terms = {CROSS_ENTROPY: {}, **terms}
    read = {}
    for name, value in {**terms, EDGES: terms.get(EDGES, {})}.items():
        known = LOSS_FIELDS[name] if name == EDGES else {**_WEIGHT, **LOSS_FIELDS[name]}
        fields = dict(value) if isinstance(value, Mapping) else {"weight": value}
        for field, number in fields.items():
            if field not in known:
                wrong = f"{name} has no field '{shown(field)}'"
                raise ConfigError(f"train.loss is {shown(loss)}: {wrong}; give some of {', '.join(known)}")
            known[field][1].check(f"train.loss is {shown(loss)}: {name}.{field}", number)
        read[name] = {field: fields.get(field, default) for field, (default, _) in known.items()}
    return read


def refuse_moved(keys: Iterable[str], where: str) -> None:
    """Raise ConfigError for keys "train.KEY" of an older version, with the new spelling of each."""
    old = [key for key in keys if key.removeprefix("train.") in MOVED and key.startswith("train.")]
    if old:
        words = [f"{name}: {{{field}: VALUE}}" for name, field in (MOVED[key.removeprefix("train.")] for key in old)]
        raise ConfigError(
            f"{where}{', '.join(old)}, now fields of train.loss; give train.loss with {', '.join(words)}, or leave the "
            "default out"
        )


def without_moved(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group `train` of a checkpoint, of which keys of an older version have become fields of `loss`."""
    loss = train.get("loss", CROSS_ENTROPY)
    terms = {loss: {}} if isinstance(loss, str) else {name: {"weight": weight} for name, weight in loss.items()}
    changed = False
    for key in MOVED.keys() & train.keys():
        name, field = MOVED[key]
        if train[key] != LOSS_FIELDS[name][field][0]:
            terms.setdefault(name, {})[field] = train[key]
            changed = True
    kept = {key: value for key, value in train.items() if key not in MOVED}
    return {**kept, "loss": terms} if changed else kept


LOSS = "loss"
SCORES = ("mean_iou", "mean_f1", "accuracy", LOSS)
_OF_CLASS = "iou."


def class_of(score: str) -> str | None:
    """The class of `iou.CLASS`; None for another score."""
    return score.removeprefix(_OF_CLASS) if score.startswith(_OF_CLASS) else None


def check_best(score: str, early_stop: int | None, epochs: int, validate_every: int) -> None:
    """Raise ConfigError for a score that there is not, or that no epoch finds out, or an early stop without one."""
    if score == "none":
        if early_stop is not None:
            raise ConfigError(
                f"train.early_stop is {early_stop}, but train.best names no score; give one of {_known()}"
            )
        return
    if score not in SCORES and not class_of(score):
        raise ConfigError(f"train.best is '{shown(score)}'; give none or one of {_known()}")
    if validate_every > epochs:
        raise ConfigError(
            f"train.best is {score}, but train.validate_every is {validate_every} and train.epochs {epochs}: nothing "
            f"is ever validated; give at most {epochs}"
        )


def _known() -> str:
    return f"{', '.join(SCORES)}, {_OF_CLASS}CLASS"


Ranks = tuple[int, ...]

SCHEDULES = ("1f1b", "gpipe", "folded")
REMOVED_SCHEDULES = {"eager": "1f1b"}
NEVER = "never"
RECOMPUTE = (NEVER, "except_last", "always")  # of which micro-batches a stage keeps inputs only
IN_STAGES = RECOMPUTE[1:]

Word = list[str] | str
"""Words for recomputation: one for all stages, or one for each."""


def split_recompute(said: Word, shorthand: Word) -> tuple[Word, Word]:
    """Of what `memory.recompute` says, and of its shorthand for stages `parallel.recompute`: the word for nodes, and
    that for stages."""
    return ("auto", said) if isinstance(said, list) or said in IN_STAGES else (said, shorthand)


def chunk_ranks(schedule: str, stages: int) -> Ranks:
    """Return the rank of each chunk. Raise ConfigError for an unknown schedule, or fewer than 1 stage."""
    one_of("the schedule", schedule, SCHEDULES, REMOVED_SCHEDULES)
    if stages < 1:
        raise ConfigError(f"the pipeline has {stages} stages; give at least 1")
    ranks = tuple(range(stages))
    return ranks + ranks[-2::-1] if schedule == "folded" else ranks
