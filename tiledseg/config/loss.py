"""What the keys of the loss may be, in the group `train` of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiledseg.config.checks import shown
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
