"""Which objective a network is trained for, by the keys of the group `train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tiledseg.architecture.gated_scnn import GatedSCNN
from tiledseg.architecture.network import Network
from tiledseg.config_checks import shown
from tiledseg.config_loss import CROSS_ENTROPY, DICE, FOCAL, TVERSKY, loss_terms
from tiledseg.errors import ConfigError
from tiledseg.training.edge_objective import EdgeObjective
from tiledseg.training.objective import ClassObjective, Objective, PixelTerms
from tiledseg.training.overlap_objective import OverlapObjective, Tversky

EDGE_KEYS = ("edge_weight", "edge_balance", "edge_radius", "attention_weight", "dual_weight")
LOSS_KEYS = ("loss", "focal_gamma", "tversky_alpha", "tversky_beta", "label_smoothing")
_DICE = 0.5  # both weights of the Tversky index with which it is Dice's


def choose_objective(
    network: Network,
    edges: Mapping[str, Any],
    losses: Mapping[str, Any],
    ignore_index: int,
    weights: tuple[float, ...] = (),
) -> Objective:
    """`edges` and `losses`: keys of the group `train` by name; `weights` of the classes, none where all are 1.

    Raises ConfigError for a key that is not as it comes where it would be ignored: of edges, where the network gives
    none, and of other losses where it gives some.
    """
    if isinstance(network, GatedSCNN):
        _check_edges(losses, weights)
        return EdgeObjective(ignore_index, **edges)
    for key, value in edges.items():
        if value != getattr(EdgeObjective, key):
            raise ConfigError(f"train.{key} is {value}, but only gated_scnn gives edges; leave it out")
    return _of_classes(network.classes, losses, ignore_index, weights)


def _of_classes(classes: int, losses: Mapping[str, Any], ignore_index: int, weights: tuple[float, ...]) -> Objective:
    terms = loss_terms(losses["loss"])
    pixels = PixelTerms(
        terms.get(CROSS_ENTROPY, 0.0), terms.get(FOCAL, 0.0), losses["focal_gamma"], losses["label_smoothing"]
    )
    objective = ClassObjective(ignore_index, weights=weights, terms=pixels)
    overlaps = [(DICE, _DICE, _DICE), (TVERSKY, losses["tversky_alpha"], losses["tversky_beta"])]
    found = tuple(Tversky(terms[name], alpha, beta) for name, alpha, beta in overlaps if name in terms)
    return OverlapObjective(objective, classes, found) if found else objective


def weighted(objective: Objective, weights: tuple[float, ...]) -> Objective:
    """The same with these weights of the classes."""
    if isinstance(objective, OverlapObjective):
        return replace(objective, pixelwise=replace(objective.pixelwise, weights=weights))
    assert isinstance(objective, ClassObjective), "others are refused beside weights"
    return replace(objective, weights=weights)


def _check_edges(losses: Mapping[str, Any], weights: tuple[float, ...]) -> None:
    of_its_own = "gated_scnn, whose loss has four terms of its own; leave it out"
    if weights:
        raise ConfigError(f"train.class_weights does not go with {of_its_own}")
    if loss_terms(losses["loss"]) != {CROSS_ENTROPY: 1.0}:
        raise ConfigError(f"train.loss is {shown(losses['loss'])}, which does not go with {of_its_own}")
    if losses["label_smoothing"]:
        raise ConfigError(f"train.label_smoothing is {losses['label_smoothing']}, which does not go with {of_its_own}")
