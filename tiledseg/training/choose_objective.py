"""The objective of a network by the keys of the group `train`: its losses together, weights of classes, its memory.

The plan counts a network's usual loss (cross-entropy; where a network gives edges, theirs) by known figures. Others are
measured on a small tile: their memory grows with the pixels. A loss that looks at labels around a tile is
overestimated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tiledseg.architecture.gated_scnn import GatedSCNN
from tiledseg.architecture.network import Network
from tiledseg.config.checks import shown
from tiledseg.config.run import Config
from tiledseg.config.train import MEDIAN_FREQUENCY, TrainConfig
from tiledseg.config.words import BOUNDARY, EDGES, LOSS_FIELDS, TVERSKY, read_loss
from tiledseg.config.words import DICE as DICE_LOSS
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import USUAL_LOSS, LossBytes
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.training.objective import DICE, BoundaryTerm, EdgesTerm, Objective, OverlapTerm, PixelTerm, Term


def choose_objective(
    network: Network, loss: str | Mapping[str, Any], ignore_index: int, weights: tuple[float, ...] = ()
) -> Objective:
    """Return the objective of `train.loss` for a network; `weights` of the classes, none where all are 1.

    Raises ConfigError for what would be ignored: fields of edges where the network gives none, and weights beside a
    loss that has none.
    """
    read = read_loss(loss)
    edges = read.pop(EDGES)
    terms: list[Term] = []
    for name, fields in read.items():
        factor = fields["weight"]
        if name == BOUNDARY:
            terms.append(BoundaryTerm(ignore_index, factor, radius=int(fields["radius"])))
        elif name in (DICE_LOSS, TVERSKY):
            overlap = network.classes, fields.get("alpha", DICE), fields.get("beta", DICE)
            terms.append(OverlapTerm(ignore_index, factor, weights, *overlap))
        else:
            terms.append(PixelTerm(ignore_index, factor, weights, fields.get("gamma"), fields.get("smoothing", 0.0)))
    if weights and all(isinstance(term, BoundaryTerm) for term in terms):
        raise ConfigError("train.class_weights has nothing to weigh in the boundary loss; leave it out, or add another")
    if isinstance(network, GatedSCNN):
        plain = PixelTerm(ignore_index, weights=weights)  # attention multiplies the cross-entropy of plain labels
        bare = next((term for term in terms if replace(plain, factor=term.factor) == term), None)
        if isinstance(bare, PixelTerm):
            terms[terms.index(bare)] = replace(bare, attention=edges["attention"])
        elif edges["attention"]:
            terms.append(replace(plain, factor=0.0, attention=edges["attention"]))
        terms.append(
            EdgesTerm(ignore_index, edges["weight"], (), edges["balance"], int(edges["radius"]), edges["dual"])
        )
        return Objective(tuple(terms))
    for field, (default, _) in LOSS_FIELDS[EDGES].items():
        if edges[field] != default:
            raise ConfigError(
                f"train.loss: edges.{field} is {edges[field]}, but only gated_scnn gives edges; leave it out"
            )
    return Objective(tuple(terms))


def objective_of(config: Config, network: Network, label_map: LabelMap, weights: tuple[float, ...]) -> Objective:
    """Return the objective; weights that are still to be counted stand as 1, so that all is refused now."""
    counted = config.train.class_weights == MEDIAN_FREQUENCY
    stand_in = (1.0,) * label_map.count if counted else weights
    return choose_objective(network, config.train.loss, label_map.ignore_index, stand_in)


def weighted(objective: Objective, weights: tuple[float, ...]) -> Objective:
    """Return the objective with these weights of the classes, where its terms have some."""
    return Objective(tuple(replace(term, weights=weights) if term.weights else term for term in objective.terms))


_KEY = "train.class_weights"


def given_weights(key: str | Sequence[float] | Mapping[str | int, float], label_map: LabelMap) -> tuple[float, ...]:
    """Return the weight of each class by `train.class_weights`: a list, or a map of class number or name to weight, 1
    elsewhere; none for a word.

    Raises ConfigError for weights of other classes, or if all are 0.
    """
    if isinstance(key, str):
        return ()
    if isinstance(key, Mapping):
        weights, named = [1.0] * label_map.count, set()
        for name, weight in key.items():
            number = label_map.numbers.get(str(name).strip())
            if number is None:
                known = f"0 to {label_map.count - 1}, or of {shown(', '.join(r.name for r in label_map.classes))}"
                raise ConfigError(f"{_KEY} has '{shown(name)}', which is no class; give some of {known}")
            if number in named:
                raise ConfigError(f"{_KEY} names class {number} twice; leave one of them out")
            named.add(number)
            weights[number] = float(weight)
    else:
        weights = [float(weight) for weight in key]
        if len(weights) != label_map.count:
            raise ConfigError(
                f"{_KEY} has {len(weights)} weights for {label_map.count} classes; give one a class, or a map"
            )
    if not any(weights):
        raise ConfigError(f"{_KEY} is {shown(key)}, with which no pixel counts; give one of them more than 0")
    return tuple(weights)


_SIDE = 192  # of the tile: 40 ms for the largest loss of 8 classes


def loss_bytes_of(config: Config, network: Network, label_map: LabelMap, objective: Objective) -> LossBytes:
    """Return the bytes of a pixel that the loss needs beyond the network's usual one; negative for less."""
    usual = choose_objective(network, TrainConfig().loss, label_map.ignore_index)
    if objective == usual:
        return USUAL_LOSS
    every = tensor_channels(network.graph(), network.bands)
    channels = [every[tensor] for tensor in network.graph().results]
    dtype = torch.float64 if config.train.precision == "fp64" else torch.float32
    ours, theirs = (_measured(each, channels, dtype) for each in (objective, usual))
    return LossBytes(ours.kept - theirs.kept, ours.peak - theirs.peak)


def _measured(objective: Objective, channels: Sequence[int], dtype: torch.dtype) -> LossBytes:
    """Measure the bytes of a pixel that are kept after its sums, and their peak until its gradients are computed, these
    included. An output counts while the loss keeps it; labels as they are read do not count."""
    from tiledseg.memory.allocations import AllocationMeter  # runs with the usual loss need nothing of it

    margin, pixels = objective.margin, _SIDE * _SIDE
    side = _SIDE + 2 * margin
    leaves = [torch.zeros(1, count, _SIDE, _SIDE, dtype=dtype) for count in channels]
    leaves = [leaf.contiguous(memory_format=torch.channels_last).requires_grad_() for leaf in leaves]
    target_BHW = torch.zeros(1, side, side, dtype=torch.int16 if margin else torch.uint8)
    with torch.enable_grad(), AllocationMeter([*leaves, target_BHW]) as meter:
        outputs = [leaf.clone() for leaf in leaves]
        sums = objective.sums(tuple(outputs), target_BHW)
        loss = sums[0] if objective.single else sums.sum()
        del sums, outputs
        kept, forward = meter.bytes, meter.peak
        meter.peak = kept
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    del gradients
    return LossBytes(kept / pixels, max(forward, meter.peak) / pixels)
