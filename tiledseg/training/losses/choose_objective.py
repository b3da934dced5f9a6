"""The objective of a network by the keys of the group `train`: its losses together, weights of classes, its memory.

The plan counts a network's usual loss (cross-entropy; where a network gives edges, theirs) by known figures. Others are
measured on a small tile: their memory grows with the pixels. A loss that looks at labels around a tile is
overestimated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tiledseg.architecture.gated_scnn import GatedSCNN
from tiledseg.architecture.network import Network
from tiledseg.config.checks import shown
from tiledseg.config.words import BOUNDARY, CROSS_ENTROPY, EDGES, FOCAL, LOSS_FIELDS, TVERSKY, read_loss
from tiledseg.config.words import DICE as DICE_LOSS
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import LossBytes
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.training.losses.edge_objective import AttentionObjective, BoundaryObjective, EdgeObjective
from tiledseg.training.losses.objective import (
    DICE,
    ClassObjective,
    Objective,
    OverlapObjective,
    PixelTerms,
    Ratios,
    Sums,
    Tversky,
)


def choose_objective(
    network: Network, loss: str | Mapping[str, Any], ignore_index: int, weights: tuple[float, ...] = ()
) -> Objective:
    """Return the objective of `train.loss` for a network; `weights` of the classes, none where all are 1.

    Raises ConfigError for what would be ignored: fields of edges where the network gives none, and weights beside a
    loss that has none.
    """
    read = read_loss(loss)
    edges = read.pop(EDGES)
    parts = _of_classes(network.classes, read, ignore_index, weights)
    if weights and all(isinstance(part, BoundaryObjective) for part in parts):
        raise ConfigError("train.class_weights has nothing to weigh in the boundary loss; leave it out, or add another")
    if isinstance(network, GatedSCNN):
        own = EdgeObjective(
            ignore_index, edges["weight"], edges["balance"], int(edges["radius"]), edges["attention"], edges["dual"]
        )
        return _with_edges(parts, own, weights)
    for field, (default, _) in LOSS_FIELDS[EDGES].items():
        if edges[field] != default:
            raise ConfigError(
                f"train.loss: edges.{field} is {edges[field]}, but only gated_scnn gives edges; leave it out"
            )
    return joint(parts, alike=not weights)


def _of_classes(
    classes: int, read: Mapping[str, Mapping[str, float]], ignore_index: int, weights: tuple[float, ...]
) -> list[Objective]:
    """Return the objectives of the scores of classes: losses of pixels and of overlaps, and of boundaries."""
    terms = {name: fields["weight"] for name, fields in read.items()}
    gamma = read.get(FOCAL, {}).get("gamma", PixelTerms.gamma)
    smoothing = read.get(CROSS_ENTROPY, {}).get("smoothing", PixelTerms.smoothing)
    pixels = PixelTerms(terms.get(CROSS_ENTROPY, 0.0), terms.get(FOCAL, 0.0), gamma, smoothing)
    objective = ClassObjective(ignore_index, weights=weights, terms=pixels)
    overlaps = tuple(
        Tversky(terms[name], read[name].get("alpha", DICE), read[name].get("beta", DICE))
        for name in (DICE_LOSS, TVERSKY)
        if name in terms
    )
    objectives: list[Objective] = []
    if overlaps:
        objectives.append(OverlapObjective(objective, classes, overlaps))
    elif pixels.cross_entropy or pixels.focal:
        objectives.append(objective)
    if BOUNDARY in terms:
        objectives.append(BoundaryObjective(ignore_index, terms[BOUNDARY], int(read[BOUNDARY]["radius"])))
    return objectives


def _with_edges(parts: list[Objective], edges: EdgeObjective, weights: tuple[float, ...]) -> Objective:
    """Join the losses of classes with those of edges; the cross-entropy alone is a term of these."""
    if parts == [ClassObjective(edges.ignore_index)]:
        return edges
    attention = AttentionObjective(edges.ignore_index, edges.attention_weight, weights)
    others: list[Objective] = [attention] if attention.factor else []
    return joint([*parts, *others, replace(edges, classes=False)], alike=not weights)


def weighted(objective: Objective, weights: tuple[float, ...]) -> Objective:
    """Return the objective with these weights of the classes, where it has some."""
    match objective:
        case AlikeObjectives(parts) | JointObjectives(parts):
            return replace(objective, parts=tuple(weighted(part, weights) for part in parts))
        case OverlapObjective():
            return replace(objective, pixelwise=replace(objective.pixelwise, weights=weights))
        case ClassObjective() | AttentionObjective():
            return replace(objective, weights=weights)
    return objective


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
            number = _class_number(name, label_map)
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


def _class_number(key: str | int, label_map: LabelMap) -> int:
    numbers = {str(k): k for k in range(label_map.count)}
    numbers |= {record.name: k for k, record in enumerate(label_map.classes)}  # a name that is a number goes first
    number = numbers.get(str(key).strip())
    if number is None:
        names = shown(", ".join(record.name for record in label_map.classes))
        raise ConfigError(
            f"{_KEY} has '{shown(key)}', which is no class; give some of 0 to {label_map.count - 1}, or of {names}"
        )
    return number


def joint(parts: Sequence[Objective], alike: bool) -> Objective:
    """Return the sum of objectives; `alike`: those that are one sum over another have the same sum of weights."""
    if len(parts) == 1:
        return parts[0]
    single = alike and not any(isinstance(part, Ratios) for part in parts)
    return AlikeObjectives(tuple(parts)) if single else JointObjectives(tuple(parts))


@dataclass(frozen=True)
class _Together:
    """Objectives whose losses are added up; each part gets the labels of its own margin."""

    parts: tuple[Objective, ...]

    @property
    def margin(self) -> int:
        return max(part.margin for part in self.parts)

    @property
    def in_words(self) -> str:
        return " + ".join(part.in_words for part in self.parts)

    def _each(self, outputs_BKHW: tuple[torch.Tensor, ...], target_BHW: torch.Tensor) -> list[Sums]:
        height, width = target_BHW.shape[1:]
        sums = []
        for part in self.parts:
            cut = self.margin - part.margin
            sums.append(part.sums(outputs_BKHW, target_BHW[:, cut : height - cut, cut : width - cut]))
        return sums


class AlikeObjectives(_Together):
    """Objectives of one sum over another each; the other is the same for all."""

    def sums(self, outputs_BKHW: tuple[torch.Tensor, ...], target_BHW: torch.Tensor) -> Sums:
        every = self._each(outputs_BKHW, target_BHW)
        return torch.stack([sums[0] for sums in every]).sum(), every[0][1]


class JointObjectives(_Together):
    """Objectives of any kinds. One whose pixels do not count in a step adds nothing."""

    @property
    def size(self) -> int:
        return sum(map(_size, self.parts))

    def sums(self, outputs_BKHW: tuple[torch.Tensor, ...], target_BHW: torch.Tensor) -> Sums:
        """Return the sums of the first part, of the second, ..."""
        return tuple(one for sums in self._each(outputs_BKHW, target_BHW) for one in sums)

    def value(self, totals: torch.Tensor) -> torch.Tensor | None:
        each = zip(self.parts, totals.split([_size(part) for part in self.parts]), strict=True)
        values = [value for value in (_value(part, own) for part, own in each) if value is not None]
        return torch.stack(values).sum() if values else None


def _size(part: Objective) -> int:
    return part.size if isinstance(part, Ratios) else 2


def _value(part: Objective, totals: torch.Tensor) -> torch.Tensor | None:
    if isinstance(part, Ratios):
        return part.value(totals)
    loss, weight = totals
    return loss / weight if bool(weight > 0) else None


_SIDE = 192  # of the tile: 40 ms for the largest loss of 8 classes


def further_bytes(objective: Objective, usual: Objective, channels: Sequence[int], precision: str) -> LossBytes:
    """Return the bytes of a pixel that `objective` needs beyond `usual`; negative for less. `channels`: of the
    network's outputs."""
    dtype = torch.float64 if precision == "fp64" else torch.float32
    ours, theirs = (_measured(each, channels, dtype) for each in (objective, usual))
    return LossBytes(ours.kept - theirs.kept, ours.peak - theirs.peak)


def _measured(objective: Objective, channels: Sequence[int], dtype: torch.dtype) -> LossBytes:
    """Measure the bytes of a pixel that are kept after its sums, and their peak until its gradients are computed, these
    included. An output counts while the loss keeps it; labels as they are read do not count."""
    from tiledseg.tracing.allocations import AllocationMeter  # runs with the usual loss need nothing of it

    margin, pixels = objective.margin, _SIDE * _SIDE
    side = _SIDE + 2 * margin
    leaves = [torch.zeros(1, count, _SIDE, _SIDE, dtype=dtype) for count in channels]
    leaves = [leaf.contiguous(memory_format=torch.channels_last).requires_grad_() for leaf in leaves]
    target_BHW = torch.zeros(1, side, side, dtype=torch.int16 if margin else torch.uint8)
    with torch.enable_grad(), AllocationMeter([*leaves, target_BHW]) as meter:
        outputs = [leaf.clone() for leaf in leaves]
        sums = objective.sums(tuple(outputs), target_BHW)
        loss = torch.cat([part.reshape(-1) for part in sums]).sum() if isinstance(objective, Ratios) else sums[0]
        del sums, outputs
        kept, forward = meter.bytes, meter.peak
        meter.peak = kept
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    del gradients
    return LossBytes(kept / pixels, max(forward, meter.peak) / pixels)
