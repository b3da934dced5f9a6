"""A training step in the memory of a rank: tiles that run at once, and tensors that are recomputed or offloaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tiledseg.errors import BudgetError, ConfigError
from tiledseg.geometry.graph import KEEP, OFFLOAD, REBUILD, Graph
from tiledseg.geometry.layers.declared import Crops
from tiledseg.geometry.sharing.layer_windows import layer_blocks
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.run.spread import Spread, measuring
from tiledseg.planning.walk.cost import tile_walk
from tiledseg.planning.walk.cost_model import LEAST, STAYING
from tiledseg.planning.walk.items import price
from tiledseg.planning.walk.step_memory import fixed_memory, network_walk, training_memory

if TYPE_CHECKING:
    from tiledseg.planning.walk.choice import MemoryChoice

MIB = 2**20
_TRIES = 4  # choices for the largest step: the next one has less room, where another step did not fit


@dataclass(frozen=True)
class OffloadPlan:
    """The bytes that a rank offloads: `kept` of a micro-batch, of which at most `staying` wait in memory. `memory`:
    bytes of a step. `chosen`: the memory policy names the offloaded tensors; False where all are offloaded."""

    kept: int
    staying: int
    memory: int
    chosen: bool = False

    def in_words(self, store: str) -> str:
        """Return the plan as a line of the log; `store`: the place of the offloaded bytes."""
        if self.kept == 0:
            return "all tensors stay in memory: each is too small to be offloaded"
        return f"{self.kept / MIB:.1f} MiB go to {store}, of which {self.staying / MIB:.1f} MiB at most stay in memory"


def why_alone(graph: Graph, spread: Spread, wide: bool) -> str | None:
    """Return why no tile can run with another, and the remedy; None where tiles can. `wide`: in float64.

    A batch is what the user sets, never what ranks, memory or a device would make it: below float64 a kernel rounds the
    sums of a batch otherwise.
    """
    if spread.mesh.stages > 1:
        return "in stages each tile is a micro-batch by itself; use parallel.stages 1"
    if spread.shares_layers:
        return "in parallel.halo layer a rank has no tiles, but a block of an image; use parallel.halo read"
    if spread.shares_images and not wide:
        return (
            "in parallel.halo exchange a rank has the tiles of its block, so the number of ranks would round the "
            "gradients' sums; use parallel.halo read"
        )
    placed_nodes = (node for node in graph.nodes if node.layer.asks_place and not isinstance(node.layer, Crops))
    placed = next((node.name for node in placed_nodes), None)  # windows of crops' size are images
    if placed is not None:
        return f"'{placed}' depends on its place in the image, and each tile has its own; leave the network without"
    step_norms = measuring(graph, over=("batch",))
    if step_norms:
        return (
            f"{step_norms[0].name} takes its statistics over a batch, which would be others; use model.freeze_norm, or "
            "another norm"
        )
    return None


def plan_rebuilt(
    question: RunQuestion, spread: Spread, tilings: Sequence[Tiling], needed: int, images: int
) -> MemoryChoice | None:
    """Choose the tensors that are recomputed or offloaded so that a step fits the memory: one choice for the steps on
    all `tilings`.

    `needed`: bytes of a step that keeps everything, with `images` (or tiles) at once. Return None where everything
    fits, where no choice fits, or where the user sets `recompute`. Raises BudgetError where the user's budget is too
    small.
    """
    budget = question.memory
    if spread.mesh.stages > 1:  # each stage has a choice of its own: see `plan.balanced`
        if question.store is not None:
            raise ConfigError(
                f"memory.offload is auto, but parallel.stages is {spread.mesh.stages}, where tensors are recomputed "
                "only; leave offload out, or give all"
            )
        return None
    if needed <= budget:
        return None
    if question.recompute != "auto":
        if question.budgeted:
            raise BudgetError(
                f"memory.budget is {budget} bytes, but with memory.recompute {question.recompute} a step needs "
                f"{needed}; leave recompute out, or use a finer tiling.grid"
            )
        return None
    from tiledseg.planning.walk.choice import block_choices, step_choices

    graph, bands, value = question.graph, question.network.bands, question.value_bytes
    if spread.shares_layers:  # the steps of each kind of rank on the largest image
        largest_image = max(tilings, key=lambda tiling: math.prod(tiling.raster))
        image = layer_blocks(largest_image, graph, (spread.mesh.rows, spread.mesh.cols))
        cuts = image.rows, image.cols
        steps = block_choices(graph, bands, cuts, value, spread.fusion, spread.overlap, question.store)
    else:
        contexts = {tiling.context_max for tiling in tilings}
        steps = [step_choices(graph, bands, context, value, question.store) for context in contexts]
    largest, fixed = max(steps, key=lambda step: step.kept), fixed_memory(graph, bands, value)
    other_bytes = needed - images * (largest.kept - fixed)
    room = left = fixed + (budget - other_bytes) // images
    for _ in range(_TRIES):  # the choice for the largest step by which all others fit too
        choice = largest.choose(left)
        if choice is None:
            break
        peak = max(step.peak(choice.policy) for step in steps)
        if peak <= room:
            return replace(choice, kept=needed, peak=other_bytes + images * (peak - fixed))
        left -= peak - room
    if not question.budgeted:
        return None
    what, use = "tile", "a finer tiling.grid, memory.blocks"
    if spread.shares_layers:
        what, use = "block of an image", "more ranks an image, memory.blocks"
    if images > 1:
        use = f"a smaller train.tiles_per_batch or train.images_per_step, {use}"
    least = other_bytes + images * (largest.least - fixed)
    error = BudgetError(
        f"memory.budget is {budget} bytes, but a training step on the largest {what} needs {needed}, and {least} with "
        f"all recomputed that helps; use {use}, or a smaller model{question.or_bf16}"
    )
    error.least = least
    raise error


def memory_note(question: RunQuestion, spread: Spread, memory: int) -> str | None:
    """Return a warning where a training step of whole tiles needs more `memory` than a rank has."""
    if not question.trains or question.parallel.stages > 1 or memory <= question.memory:
        return None
    what, use = "a training step on the largest tile", "a finer tiling.grid"
    if question.windows is not None:
        what = "a step on the largest windows or tile"
        use = "fewer windows per_step or smaller ones, and for the validation a finer tiling.grid"
    elif spread.shares_layers:
        what = "with parallel.halo layer the whole block of a rank"
        use = "more ranks an image, or mode exchange or read with a finer tiling.grid"
    needed, had = memory / 2**30, question.memory / 2**30
    return f"{what} needs about {needed:.1f} GiB, but {had:.1f} GiB are available; use {use}"


def offload_by(choice: MemoryChoice) -> OffloadPlan | None:
    """Return the plan of the tensors that a choice offloads; None where it offloads none."""
    if not choice.away:
        return None
    sizes = [size for _, size in choice.away]
    return OffloadPlan(sum(sizes), min(sum(sizes), STAYING * max(sizes)), choice.peak, chosen=True)


def plan_offload(
    question: RunQuestion, spread: Spread, context: tuple[int, int], needed: int, tiles: int = 1
) -> OffloadPlan:
    """Plan steps that offload all that the backward pass needs, of `tiles` micro-batches at once, the largest one with
    a context of (height, width).

    `needed`: bytes of a step on one micro-batch that keeps everything. They are also the plan's bytes, an upper bound,
    where ranks share layers, in stages, and where tensors are recomputed. Raises BudgetError where the user's budget is
    too small.
    """
    graph, bands, value = question.graph, question.network.bands, question.value_bytes
    forward = tile_walk(graph, bands, context, value)
    walk = network_walk(forward)
    words = [(OFFLOAD if i.bytes * tiles >= LEAST else KEEP) if i.used else REBUILD for i in walk.items]
    leaving = [item.bytes for item, word in zip(walk.items, words, strict=True) if word == OFFLOAD]
    staying, memory = min(sum(leaving), STAYING * max(leaving, default=0)), needed
    if not spread.shares_layers and spread.mesh.stages == 1 and (graph.memory is None or graph.memory.keeps_all):
        step = training_memory(graph, bands, context, value)
        # The forward pass's own tensors cannot be offloaded: those that later nodes read, and the one just made.
        sizes = [forward.input_bytes, *(cost.output_bytes for cost in forward.costs)]
        place, held, most = graph.homes, {0}, 0
        for k, released in enumerate(graph.released):
            held.add(k + 1)
            most = max(most, sum(sizes[home] for home in {place[tensor] for tensor in held}))
            held -= set(released)
        peak = staying + max(price(walk, words).peak, most)
        memory = min(needed, max(needed, step.total) - step.activations - step.backward + peak)
    memory += (tiles - 1) * (memory - fixed_memory(graph, bands, value))
    if question.budgeted and memory > question.memory:
        raise BudgetError(
            f"memory.budget is {question.memory} bytes, but with memory.offload all a step needs {memory}; use a finer "
            f"tiling.grid, or a smaller model{question.or_bf16}"
        )
    return OffloadPlan(sum(leaving), staying, memory)
