"""The objective of a network by the keys of the group `train`: its losses, the weights of classes, its memory.

The plan knows the bytes of the usual loss: cross-entropy, and the edge losses of a network with edges. The memory of
other losses is measured on a small tile and grows with the pixels. A loss that reads labels around a tile is
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
from tiledseg.config.train import TrainConfig
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
    """Return the objective of `train.loss` for a network. `weights`: one for each class; empty if all are 1.

    Raises ConfigError for settings that would be ignored: edge fields for a network without edges, and class weights
    for a loss that uses none.
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


def weighted(objective: Objective, weights: tuple[float, ...]) -> Objective:
    """Return the objective with these class weights in each term that has class weights."""
    return Objective(tuple(replace(term, weights=weights) if term.weights else term for term in objective.terms))


_KEY = "train.class_weights"


def given_weights(key: str | Sequence[float] | Mapping[str | int, float], label_map: LabelMap) -> tuple[float, ...]:
    """Return the weight of each class by `train.class_weights`; empty if the key is a word.

    A list has a weight for each class. A map has weights by class number or name; other classes weigh 1. Raises
    ConfigError for unknown classes, or if all weights are 0.
    """
    if isinstance(key, str):
        return ()
    if isinstance(key, Mapping):
        weights, named = [1.0] * label_map.count, set()
        for name, weight in key.items():
            number = label_map.numbers.get(str(name).strip())
            if number is None:
                known = f"0 to {label_map.count - 1}, or of {shown(', '.join(r.name for r in label_map.classes))}"
                raise ConfigError(f"{_KEY}: '{shown(name)}' is no class; use some of {known}")
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
        raise ConfigError(f"{_KEY} is {shown(key)}: all weights are 0; give one of them more than 0")
    return tuple(weights)


_SIDE = 192  # of the tile: 40 ms for the largest loss of 8 classes


def loss_bytes_of(config: Config, network: Network, label_map: LabelMap, objective: Objective) -> LossBytes:
    """Return the bytes per pixel of the objective minus those of the network's usual loss; may be negative."""
    usual = choose_objective(network, TrainConfig().loss, label_map.ignore_index)
    if objective == usual:
        return USUAL_LOSS
    every = tensor_channels(network.graph(), network.bands)
    channels = [every[tensor] for tensor in network.graph().results]
    dtype = torch.float64 if config.train.precision == "fp64" else torch.float32
    ours, theirs = (_measured(each, channels, dtype) for each in (objective, usual))
    return LossBytes(ours.kept - theirs.kept, ours.peak - theirs.peak)


def _measured(objective: Objective, channels: Sequence[int], dtype: torch.dtype) -> LossBytes:
    """Measure an objective's bytes per pixel: kept after the forward pass, and at the peak with the gradients. A
    network output counts as long as the loss keeps it. The labels read from a file do not count."""
    from tiledseg.memory.allocations import AllocationMeter  # here: runs with the usual loss do not need it

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
