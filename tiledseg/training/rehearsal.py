"""A rehearsal of a job: the set-up and the first step of its ranks, one after the other in one process, by the code of
a run.

Tensors have a shape and no values (torch's device `meta`). Messages between ranks are recorded and matched
(`comm.collectives`). Axes and the share of the first step are computed for every rank. Forward and backward passes run
for the ranks of one replica, once for each size of image; stages run as many micro-batches as one period of the
schedule. If tiles are dealt out, the passes run for the first and the last rank.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tiledseg.architecture.network import ForeignNetwork
from tiledseg.comm.collectives import RehearsedCommunicator, unmatched
from tiledseg.comm.doing import name_ranks
from tiledseg.comm.launch import Launch, open_files_needed
from tiledseg.comm.mesh import Mesh, open_axes
from tiledseg.errors import InputError
from tiledseg.execution.carrying import CAST_DTYPES, PARAMETER_DTYPES
from tiledseg.execution.halo_modes import Part, Piece, ReadMode
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.part_passes import Passes
from tiledseg.gradients import GradientReducer
from tiledseg.models.dropout import ChannelDropout, DropoutKey
from tiledseg.models.network import GraphNetwork
from tiledseg.planning.answer.text import DEFAULTS, network_text
from tiledseg.raster.labels.label_map import read_labels
from tiledseg.raster.samples.dataset import Sample
from tiledseg.raster.samples.sampling import Position
from tiledseg.raster.statistics import statistics_blocks
from tiledseg.tracing.build import network_modules
from tiledseg.training.offloading import remedy
from tiledseg.training.preparation import Preparation
from tiledseg.training.run_files import check_run_folder
from tiledseg.units import SINGLE_BYTES, size

_META = torch.device("meta")
_LABEL_SECONDS = 20.0  # limit on reading labels, beyond one block of each file


def rehearse(preparation: Preparation, ranks: int, per_node: int, gpu_memory: int, planned: str = "") -> dict[str, Any]:
    """Rehearse a run prepared for so many ranks; return the figures of its first step for JSON.

    `planned`: the plan's description of the network. `messages`, `bytes`, `groups`, `peers`: the most of any rank.
    `sums`, `summed`: all-reduces of norms and gradients of a rank, and their bytes. `tiles`: parts of the step; `idle`:
    ranks without one. `fails`: faults that would end the job. Raises InputError if a rank's set-up is refused.
    """
    begun = time.perf_counter()
    spread, memory = preparation.plan.spread, preparation.plan.memory
    meshes, doings = [], {rank: RehearsedCommunicator(rank, ranks) for rank in range(ranks)}
    for rank, done in doings.items():
        on_node = min(per_node, ranks - rank + rank % per_node)  # the last node may have fewer
        launch = Launch(rank, ranks, rank % per_node, on_node, "rehearsal")
        meshes.append(Mesh(launch, done, _META, "rehearsal", "here"))
    shares = _walk(preparation, meshes)
    groups = 1 + max(len(done.groups) for done in doings.values())
    peers = max(len(done.sent.keys() | done.received.keys()) for done in doings.values())
    sent, summed = (
        [[n for each in getattr(done, kind).values() for n in each] for done in doings.values()]
        for kind in ("sent", "summed")
    )
    files, root = (open_files_needed(ranks, keeps, peers) for keeps in (False, True))
    idle = [rank for rank, parts in enumerate(shares) if not parts]
    warnings = [f"{len(idle)} of {ranks} ranks have no part of the first step: {name_ranks(idle)}"] if idle else []
    if preparation.question.value_bytes < SINGLE_BYTES and any(sent):
        warnings.append(f"bytes of messages are of fp32: up to twice those of {preparation.config.train.precision}")
    network = network_text(preparation.question).replace("\n", ", ")
    if planned and " ".join(planned.split()) != network.removesuffix(DEFAULTS):
        warnings.append(f"the plan was made for another network: {' '.join(planned.split())}")
    read, blocks, fails = _try_files(preparation)
    if memory > gpu_memory:
        fails.append(
            f"a step needs {size(memory)} on the fullest rank, of {size(gpu_memory)}; "
            + remedy(preparation.question, preparation.plan, min(preparation.question.memory, gpu_memory))
        )
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # this machine's, which stands for the job's
    if allowed != resource.RLIM_INFINITY and allowed < root:
        fails.append(f"rank 0 needs {root} open files, of {allowed} that are allowed here; raise the limit (ulimit -n)")
    active = {rank: done for rank, done in doings.items() if done.sent or done.received or done.summed}
    return {
        "ranks": ranks,
        "network": network,
        "mode": spread.in_words,
        "tiles": sum(map(len, shares)),
        "idle": len(idle),
        "memory": memory,
        "gpu_memory": gpu_memory,
        "rasters": max(len({part.image for part in parts}) for parts in shares),
        "groups": groups,
        "peers": peers,
        "messages": max(map(len, sent)),
        "bytes": max(map(sum, sent)),
        "sums": max(map(len, summed)),
        "summed": max(map(sum, summed)),
        "open_files": files,
        "open_files_of_root": root,
        "labels_read": read,
        "label_blocks": blocks,
        "seconds": time.perf_counter() - begun,
        "fails": [*fails, *unmatched(active)[:5]],
        "warnings": [*preparation.warnings, *warnings],
    }


def _try_files(preparation: Preparation) -> tuple[int, int, list[str]]:
    """Check the output folder, and read labels: the middle block of each file, then others within `_LABEL_SECONDS`.

    Return the number of blocks read, the number of all blocks, and the faults.
    """
    fails, begun, read = list[str](), time.perf_counter(), 0
    sets = [each for each in (preparation.training, preparation.validation) if each]
    readers = [each.open_labels(number) for each in sets for number in range(len(each.labels))]
    blocks = statistics_blocks([reader.info for reader in readers])
    files = [list(own) for _, own in groupby(blocks, lambda block: block.image)]
    try:
        check_run_folder(Path(preparation.config.run.output), preparation.files)
    except InputError as error:
        fails.append(str(error))
    try:
        for block in dict.fromkeys((*(own[len(own) // 2] for own in files), *blocks)):
            if read < len(files) or time.perf_counter() - begun < _LABEL_SECONDS:
                read_labels(readers[block.image], preparation.label_map, block.box)
                readers[block.image].release()
                read += 1
    except InputError as error:
        fails.append(str(error))
    return read, len(blocks), fails


def _walk(preparation: Preparation, meshes: Sequence[Mesh]) -> list[tuple[Part, ...]]:
    """Run the first step; return each rank's parts of it. If tiles are dealt to ranks, the first and the last rank run
    it; else those of the first replica: ranks of other replicas send the same messages."""
    walker, shape = _Walker(preparation), preparation.plan.spread.mesh
    alone = not preparation.plan.spread.shares_images and shape.stages == 1
    owners, each = (len(meshes), 1) if alone else (shape.replicas, shape.ranks // shape.replicas)
    running = {0, len(meshes) - 1} if alone else range(each)
    shares: list[tuple[Part, ...]] = []
    dealt: Sequence[tuple[Part, ...]] = ()  # the parts of every owner, in mode `read`
    for mesh in meshes:
        owner, place = divmod(mesh.rank, each)
        if mesh.rank in running or (owner < owners and place == 0 and not dealt):
            run, passes = walker.open(mesh, mesh.rank in running)
            if type(passes.mode) is ReadMode:
                dealt = dealt or passes.mode.dealt(walker.first)
            shares.append(dealt[owner] if dealt else passes.mode.share(walker.first))
            if mesh.rank in running:
                walker.step(run, passes, shares[-1])
            continue
        if not alone:
            open_axes(mesh, shape)
        shares.append(() if owner >= owners else dealt[owner] if dealt else shares[mesh.rank - place])
    return shares


class _Sum:
    """A loss: the sum of all outputs."""

    looks_first = False

    def look(self, piece: Piece, sample: Sample) -> None: ...

    def agree(self) -> None: ...

    def __call__(self, pieces: Sequence[tuple[Piece, Sample]]) -> torch.Tensor:
        return torch.stack([made.sum() for piece, _ in pieces for made in (piece.logits_BKHW, *piece.others)]).sum()


class _Walker:
    """A network without values, and the first step of its ranks."""

    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation
        precision = preparation.config.train.precision
        self._precision = "fp32" if precision in CAST_DTYPES else precision  # tensors without values are not cast
        self.first = next(iter(preparation.sampler.steps_from(Position(0, 0), 1)))[1]
        self._whole = self._network()

    def _network(self) -> GraphNetwork:
        planned, still = self._preparation.plan.network, self._preparation.config.model.freeze_norm
        with torch.device("cpu") if isinstance(planned, ForeignNetwork) else _META:  # tracing compares values
            network = network_modules(planned, 0, still=still)
        network.to(_META).train()
        for module in network.modules():
            if isinstance(module, ChannelDropout):
                module.eval()  # dropout draws values, and sends no message
        return network

    def open(self, mesh: Mesh, runs: bool = True) -> tuple[ParallelRun, Passes]:
        """Open a rank's axes and passes, as a run does. A rank of a pipeline that `runs` gets its own network."""
        plan = self._preparation.plan
        network = self._network() if plan.pipeline and runs else self._whole
        run = ParallelRun(plan.spread, network, mesh, self._precision, plan.pipeline)
        return run, run.over(plan.tilings, plan.tiles_per_batch)

    def step(self, run: ParallelRun, passes: Passes, own: Sequence[Part]) -> None:
        """Run a step on one part of each size among a rank's own; in stages on four parts a stage."""
        plan = self._preparation.plan
        stages = plan.spread.mesh.stages
        parts = own[: 4 * stages]
        if stages == 1:
            parts = list({plan.tilings[part.image].raster: part for part in reversed(own)}.values())[::-1]
        reducer = GradientReducer(passes.mode.network.parameters(), run.axes.weights)
        reducer.zero()
        samples = map(self._sample, parts)
        passes.train(samples, parts, lambda image: DropoutKey(0, 0, image), _Sum(), reducer)
        reducer.finish()
        reducer.close()

    def _sample(self, part: Part) -> Sample:
        bands, dtype = self._preparation.plan.network.bands, PARAMETER_DTYPES[self._precision]
        x_CHW = torch.empty(bands, *part.tile.context.shape, device=_META, dtype=dtype)
        carried = SimpleNamespace(await_all=lambda: (x_CHW, None))
        return Sample(part.image, part.tile, np.empty(0), None, np.empty(0, bool), carried=carried)
