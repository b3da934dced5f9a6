"""What the backward pass of a network asks for, node by node: tensors, and what a node keeps beside them.

Of a network on a context, or of a rank's block of it: there a node may compute from a window that was made for it
alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.layers.layer import Shape
from tiledseg.geometry.memory_policy import homes
from tiledseg.planning.step.cost import INDEX_BYTES


class Taken(NamedTuple):
    """What a node computes from: its bytes, and those of a value. `home`: the tensor that it is in memory, None where
    it was made for this node alone."""

    home: int | None
    bytes: int
    width: int


class Computed(NamedTuple):
    """A node as it is computed: at which `moment`, from what, to an output of `shape` and `made` bytes, in how many
    seconds.

    `fresh`: bytes of the tensors that are made for it alone; `noted`: bytes of what has arrived from others for them,
    kept where it is computed once more. `over_ranks`: its statistics are of several ranks.
    """

    moment: int
    taken: tuple[Taken, ...]
    shape: Shape
    made: int
    seconds: float
    fresh: int = 0
    noted: int = 0
    over_ranks: bool = False


@dataclass
class Asked:
    """Of each home the moments at which it is asked for, in order; and bytes kept inside nodes: large ones, and
    others. `copies`: of the large ones who are more than windows: nodes that compute before all of it is there."""

    moments: list[list[int]]
    large: dict[int, int] = field(default_factory=dict)
    small: dict[int, int] = field(default_factory=dict)
    copies: set[int] = field(default_factory=set)

    def ask(self, home: int, moment: int) -> None:
        if moment not in self.moments[home]:
            self.moments[home].append(moment)


def asked_of(graph: Graph, computed: Mapping[int, Computed], width: int) -> Asked:
    """As `planning.step.cost.keep_for_backward` counts what autograd keeps, each by itself, of these nodes. `width`:
    bytes of a value."""
    found = Asked([[] for _ in graph.names])
    for k, each in computed.items():
        if not graph.layers[k].hands_on and graph.wants_gradient[k + 1]:
            _ask(found, graph, k, each, width)
    return found


def _ask(found: Asked, graph: Graph, k: int, each: Computed, width: int) -> None:
    layer, made = graph.layers[k], homes(graph)[k + 1]
    if graph.overwrites[k]:
        found.ask(made, each.moment)
        return
    besides = layer.kept_besides(each.shape, width)
    copies = windows = 0
    for index in layer.kept_inputs:
        taken = each.taken[index]
        needed = taken.width if each.over_ranks else layer.input_width(taken.width, width)
        if needed != taken.width:
            copies += taken.bytes // taken.width * needed
        elif taken.home is None:
            windows += taken.bytes
        else:
            found.ask(taken.home, each.moment)
    if layer.keeps_output:
        found.ask(made, each.moment)
    most = max(taken.bytes // taken.width for taken in each.taken)
    is_large = besides >= INDEX_BYTES * min(math.prod(each.shape), most)
    inside = copies + windows + besides * is_large
    found.large |= {k: inside} if inside or is_large else {}
    found.small |= {} if is_large else {k: besides}
    found.copies |= {k} if inside > windows else set()
