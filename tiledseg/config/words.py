"""Words of the configuration that other rooms share: losses, scores, schedules of pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiledseg.config.checks import one_of, shown
from tiledseg.errors import ConfigError

CROSS_ENTROPY, FOCAL, DICE, TVERSKY, BOUNDARY = LOSSES = ("cross_entropy", "focal", "dice", "tversky", "boundary")
_OF = {
    "focal_gamma": FOCAL,
    "tversky_alpha": TVERSKY,
    "tversky_beta": TVERSKY,
    "label_smoothing": CROSS_ENTROPY,
    "boundary_radius": BOUNDARY,
}
"""The loss that a key belongs to, without which it would be ignored."""


def loss_terms(loss: str | Mapping[str, float]) -> dict[str, float]:
    """Each loss and how much it counts, of a name or a map. Raises ConfigError for what is none."""
    terms = {loss: 1.0} if isinstance(loss, str) else {name: float(factor) for name, factor in loss.items()}
    if not terms or not terms.keys() <= set(LOSSES):
        what = f"'{shown(loss)}'" if isinstance(loss, str) else shown(loss)
        raise ConfigError(
            f"train.loss is {what}; give one of {', '.join(LOSSES)}, or a map of some to what each counts"
        )
    return terms


def check_loss(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a loss that there is not, or a key of one that is not asked for; `values` of the group
    `train` by key, each beside its default."""
    terms = loss_terms(values["loss"][0])
    for key, name in _OF.items():
        value, default = values[key]
        if value != default and name not in terms:
            raise ConfigError(f"train.{key} is {value}, but train.loss has no {name}; leave it out, or add {name}")


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
"""Of what is computed once more: one for all stages, or one for each."""


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
