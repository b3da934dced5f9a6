"""Which objective a network is trained for, by the keys of the group `train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tiledseg.architecture.gated_scnn import GatedSCNN
from tiledseg.architecture.network import Network
from tiledseg.config.loss import BOUNDARY, CROSS_ENTROPY, FOCAL, TVERSKY, loss_terms
from tiledseg.config.loss import DICE as DICE_LOSS
from tiledseg.errors import ConfigError
from tiledseg.training.losses.boundary_objective import BoundaryObjective
from tiledseg.training.losses.edge_objective import AttentionObjective, EdgeObjective
from tiledseg.training.losses.joint_objective import AlikeObjectives, JointObjectives, joint
from tiledseg.training.losses.objective import ClassObjective, Objective, PixelTerms
from tiledseg.training.losses.overlap_objective import DICE, OverlapObjective, Tversky

EDGE_KEYS = ("edge_weight", "edge_balance", "edge_radius", "attention_weight", "dual_weight")
LOSS_KEYS = ("loss", "focal_gamma", "tversky_alpha", "tversky_beta", "label_smoothing", "boundary_radius")


def choose_objective(
    network: Network,
    edges: Mapping[str, Any],
    losses: Mapping[str, Any],
    ignore_index: int,
    weights: tuple[float, ...] = (),
) -> Objective:
    """`edges` and `losses`: keys of the group `train` by name; `weights` of the classes, none where all are 1.

    Raises ConfigError for what would be ignored: a key of edges that is not as it comes where the network gives none,
    and weights beside a loss that has none.
    """
    parts = _of_classes(network.classes, losses, ignore_index, weights)
    if weights and all(isinstance(part, BoundaryObjective) for part in parts):
        raise ConfigError("train.class_weights has nothing to weigh in the boundary loss; leave it out, or add another")
    if isinstance(network, GatedSCNN):
        return _with_edges(parts, EdgeObjective(ignore_index, **edges), weights)
    for key, value in edges.items():
        if value != getattr(EdgeObjective, key):
            raise ConfigError(f"train.{key} is {value}, but only gated_scnn gives edges; leave it out")
    return joint(parts, alike=not weights)


def _of_classes(
    classes: int, losses: Mapping[str, Any], ignore_index: int, weights: tuple[float, ...]
) -> list[Objective]:
    """What is asked of the scores of classes: losses of pixels and of overlaps, and of boundaries."""
    terms = loss_terms(losses["loss"])
    pixels = PixelTerms(
        terms.get(CROSS_ENTROPY, 0.0), terms.get(FOCAL, 0.0), losses["focal_gamma"], losses["label_smoothing"]
    )
    objective = ClassObjective(ignore_index, weights=weights, terms=pixels)
    overlaps = [(DICE_LOSS, DICE, DICE), (TVERSKY, losses["tversky_alpha"], losses["tversky_beta"])]
    asked = tuple(Tversky(terms[name], alpha, beta) for name, alpha, beta in overlaps if name in terms)
    found: list[Objective] = []
    if asked:
        found.append(OverlapObjective(objective, classes, asked))
    elif pixels.cross_entropy or pixels.focal:
        found.append(objective)
    if BOUNDARY in terms:
        found.append(BoundaryObjective(ignore_index, terms[BOUNDARY], losses["boundary_radius"]))
    return found


def _with_edges(parts: list[Objective], edges: EdgeObjective, weights: tuple[float, ...]) -> Objective:
    """The losses of classes with those of edges; the cross-entropy alone is a term of these."""
    if parts == [ClassObjective(edges.ignore_index)]:
        return edges
    attention = AttentionObjective(edges.ignore_index, edges.attention_weight, weights)
    others: list[Objective] = [attention] if attention.factor else []
    return joint([*parts, *others, replace(edges, classes=False)], alike=not weights)


def weighted(objective: Objective, weights: tuple[float, ...]) -> Objective:
    """The same with these weights of the classes, where it has some."""
    match objective:
        case AlikeObjectives(parts) | JointObjectives(parts):
            return replace(objective, parts=tuple(weighted(part, weights) for part in parts))
        case OverlapObjective():
            return replace(objective, pixelwise=replace(objective.pixelwise, weights=weights))
        case ClassObjective() | AttentionObjective():
            return replace(objective, weights=weights)
    return objective
