"""The scores by which a validation may be the best, as a configuration names them."""

from __future__ import annotations

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError

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
