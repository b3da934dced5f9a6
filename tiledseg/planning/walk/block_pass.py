"""The pass of a rank that shares an image: what it keeps for its backward pass, and what computing that again takes.

A moment is each step of `layer_memory`'s walk, so that the windows and paddings between the layers have their own. A
convolution keeps a window that was made for it. To compute that once more its input must be there, and what has arrived
from others, which stays; nothing is sent.
"""

from __future__ import annotations

from dataclasses import replace

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.memory_policy import homes
from tiledseg.planning.step.backward_walk import gradients_by_node
from tiledseg.planning.step.cost import Tensor, loss_bytes
from tiledseg.planning.step.rank_steps import RankSteps
from tiledseg.planning.step.unfolding import unfolded_bytes
from tiledseg.planning.walk.asked import Computed, Taken
from tiledseg.planning.walk.items import price
from tiledseg.planning.walk.layer_memory import Ran, RankWalk, rank_walk
from tiledseg.planning.walk.network_walk import NetworkWalk, Pass, Speed, walk_of
from tiledseg.planning.walk.step_memory import StepMemory, walked_memory

ASSUMED = Speed()


def block_memory(graph: Graph, bands: int, row: RankSteps, col: RankSteps, ranks: int, value_bytes: int) -> StepMemory:
    """Bytes of one training step of the rank with these steps, one of `ranks` that share the image.

    Without its strips and the block that it was given.
    """
    walk = rank_walk(graph, bands, row, col, ranks, value_bytes)
    memory = walked_memory(walk.walked, walk.costs, value_bytes)
    if graph.memory is None or graph.memory.keeps_all:
        return memory
    found = block_walk(walk)
    peak = price(found.walk, found.lying(graph.memory)).peak
    return replace(memory, backward=max(0, peak - memory.activations), activations=min(peak, memory.activations))


def block_walk(walk: RankWalk, speed: Speed = ASSUMED) -> NetworkWalk:
    """The items of a rank whose block was walked from the first layer to the last."""
    return walk_of(_block_pass(walk, speed))


def _block_pass(walk: RankWalk, speed: Speed) -> Pass:
    graph, steps = walk.graph, walk.walked
    place = homes(graph)
    known = {id(walk.made[0].tensor): 0}
    sizes = [walk.made[0].tensor.bytes, *(ran.made.bytes for ran in walk.ran)]
    computed = {}
    for k, ran in enumerate(walk.ran):
        taken = tuple(_taken(tensor, known) for tensor in ran.brought)
        known.setdefault(id(ran.made), place[k + 1])
        sizes[place[k + 1]] = ran.made.bytes  # the last of those that write over it
        seconds = sum(map(speed.seconds, walk.costs[ran.first : ran.moment + 1]))
        unfolded = unfolded_bytes(graph.layers[k], walk.costs[ran.moment], walk.value_bytes)
        computed[k] = _computed(ran, taken, seconds, unfolded)
    gradients = tuple(gradients_by_node(steps, walk.costs, walk.value_bytes))
    loss = loss_bytes([walk.costs[tensor - 1] for tensor in steps.results], walk.value_bytes)
    return Pass(graph, computed, tuple(sizes), gradients, loss, walk.value_bytes)


def _computed(ran: Ran, taken: tuple[Taken, ...], seconds: float, unfolded: int) -> Computed:
    fresh = ran.fresh + unfolded
    return Computed(ran.moment, taken, ran.shape, ran.made.bytes, seconds, fresh, ran.noted, over_ranks=ran.over_ranks)


def _taken(tensor: Tensor, known: dict[int, int]) -> Taken:
    return Taken(known.get(id(tensor)), tensor.bytes, tensor.value_bytes)
