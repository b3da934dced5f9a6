"""Several objectives together: the loss of a step is the sum of theirs.

Where all of them are means over the same weights, the sum is a mean too, and one pass does. Else each keeps its sums
(`Ratios`), and the step goes forward first where its tiles are not at hand together (`step_loss`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiledseg.records import dataclass
from tiledseg.training.losses.objective import Objective, Ratios, Sums


def joint(parts: Sequence[Objective], alike: bool) -> Objective:
    """Their sum; `alike`: those that are one sum over another have the same sum of weights."""
    if len(parts) == 1:
        return parts[0]
    single = alike and not any(isinstance(part, Ratios) for part in parts)
    return AlikeObjectives(tuple(parts)) if single else JointObjectives(tuple(parts))


@dataclass(frozen=True)
class _Together:
    """Each part is given the labels of its own margin."""

    parts: tuple[Objective, ...]

    @property
    def margin(self) -> int:
        return max(part.margin for part in self.parts)

    @property
    def in_words(self) -> str:
        return " + ".join(part.in_words for part in self.parts)

    def _each(self, outputs_BKHW: tuple[torch.Tensor, ...], target_BHW: torch.Tensor) -> list[Sums]:
        height, width = target_BHW.shape[1:]
        found = []
        for part in self.parts:
            cut = self.margin - part.margin
            found.append(part.sums(outputs_BKHW, target_BHW[:, cut : height - cut, cut : width - cut]))
        return found


class AlikeObjectives(_Together):
    """Each one sum over another, and the other the same for all."""

    def sums(self, outputs_BKHW: tuple[torch.Tensor, ...], target_BHW: torch.Tensor) -> Sums:
        found = self._each(outputs_BKHW, target_BHW)
        return torch.stack([sums[0] for sums in found]).sum(), found[0][1]


class JointObjectives(_Together):
    """Of any kinds. One whose pixels do not count in a step adds nothing."""

    @property
    def size(self) -> int:
        return sum(map(_size, self.parts))

    def sums(self, outputs_BKHW: tuple[torch.Tensor, ...], target_BHW: torch.Tensor) -> Sums:
        """Those of the first part, of the second, ..."""
        return tuple(one for sums in self._each(outputs_BKHW, target_BHW) for one in sums)

    def value(self, totals: torch.Tensor) -> torch.Tensor | None:
        each = zip(self.parts, totals.split([_size(part) for part in self.parts]), strict=True)
        known = [value for value in (_value(part, own) for part, own in each) if value is not None]
        return torch.stack(known).sum() if known else None


def _size(part: Objective) -> int:
    return part.size if isinstance(part, Ratios) else 2


def _value(part: Objective, totals: torch.Tensor) -> torch.Tensor | None:
    if isinstance(part, Ratios):
        return part.value(totals)
    loss, weight = totals
    return loss / weight if bool(weight > 0) else None
