"""The set-up and the first step of the ranks of a job, one after the other in one process, by the code that a run's
ranks execute.

Tensors have a shape and no values (torch's device `meta`), and messages between ranks are written down and matched
(`comm.collectives`). The axes and the share of the first step are those of every rank. Forward and backward
passes are walked by the ranks of one replica, for each size of image, in stages for so many micro-batches that the
schedule repeats itself: other replicas do the same. Where tiles are dealt out the first and the last rank are walked.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiledseg.architecture.network import ForeignNetwork
from tiledseg.comm.collectives import Doings, RehearsedCommunicator, unmatched
from tiledseg.comm.doing import name_ranks
from tiledseg.comm.launch import Launch, open_files_needed
from tiledseg.comm.mesh import Mesh, open_axes
from tiledseg.errors import ConfigError, InputError
from tiledseg.execution.carrying import CAST_DTYPES, PARAMETER_DTYPES
from tiledseg.execution.halo_modes import Part, Piece, ReadMode
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.part_passes import Passes
from tiledseg.geometry.sharing.decomposition import MeshShape
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
from tiledseg.training.preparation import Preparation, why_uncompiled
from tiledseg.training.run_files import check_run_folder
from tiledseg.units import SINGLE_BYTES, size

_META = torch.device("meta")
_LABEL_SECONDS = 20.0  # of reading labels, besides one block of each file


def rehearse(preparation: Preparation, ranks: int, per_node: int, gpu_memory: int, planned: str = "") -> dict[str, Any]:
    """Walk a run that has been prepared for so many ranks; return the figures of its first step as JSON has them.

    `planned`: the network of the plan, in words. `messages`, `bytes` and sums are the most of any rank, on each size of
    image. `tiles`: parts of the step; `idle`: ranks without one. `groups`, `peers`: of a rank. `sums`, `summed`: of
    norms and gradients, and their bytes. `fails`: reasons why the job would end; `warnings`: what it would waste.
    Raises InputError where a rank's own set-up is refused.
    """
    begun = time.perf_counter()
    if refusal := why_uncompiled(preparation):
        raise ConfigError(refusal)
    spread, memory = preparation.plan.spread, preparation.plan.memory
    meshes, doings = [], {rank: Doings() for rank in range(ranks)}
    for rank, done in doings.items():
        on_node = min(per_node, ranks - rank + rank % per_node)  # the last node may have fewer
        launch = Launch(rank, ranks, rank % per_node, on_node, "rehearsal")
        meshes.append(Mesh(launch, RehearsedCommunicator(rank, ranks, done), _META, "rehearsal", "here"))
    shares = _walk(preparation, meshes)
    groups = 1 + max(len(done.groups) for done in doings.values())
    peers = max(len(done.sent.keys() | done.received.keys()) for done in doings.values())
    sent, summed = (
        [[n for each in getattr(done, kind).values() for n in each] for done in doings.values()]
        for kind in ("sent", "summed")
    )
    files, root = (open_files_needed(ranks, keeps, peers) for keeps in (False, True))
    idle = [rank for rank, (parts, _) in enumerate(shares) if not parts]
    warnings = [f"{len(idle)} of {ranks} ranks have no part of the first step: {name_ranks(idle)}"] if idle else []
    if preparation.question.value_bytes < SINGLE_BYTES and any(sent):
        warnings.append(f"bytes of messages are of fp32: up to twice what {preparation.config.train.precision} sends")
    network = network_text(preparation.question).replace("\n", ", ")
    if planned and " ".join(planned.split()) != network.removesuffix(DEFAULTS):
        warnings.append(f"planned was another network, and its memory and time: {' '.join(planned.split())}")
    read, blocks, fails = _look(preparation)
    if memory > gpu_memory:
        fails.append(
            f"a step needs {size(memory)} on the rank that needs most, of {size(gpu_memory)}; "
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
        "tiles": sum(len(parts) for parts, _ in shares),
        "idle": len(idle),
        "memory": memory,
        "gpu_memory": gpu_memory,
        "rasters": max(len({part.image for part in parts}) if reads else 0 for parts, reads in shares),
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


def _look(preparation: Preparation) -> tuple[int, int, list[str]]:
    """Try the output folder, and read labels: the middle block of each file, then the others for some seconds. Return
    the blocks read, all blocks, and what a run refuses."""
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


_Share = tuple[tuple[Part, ...], bool]
"""A rank's parts of the first step, and True if it reads them."""


def _walk(preparation: Preparation, meshes: Sequence[Mesh]) -> list[_Share]:
    """Do the first step of all ranks; return each rank's share of it."""
    walker, shape = _Walker(preparation), preparation.plan.spread.mesh
    if preparation.plan.spread.shares_images or shape.stages > 1:
        return _walk_replicas(shape, meshes, walker)
    run, passes = walker.open(meshes[0])
    assert isinstance(passes.mode, ReadMode), "tiles are dealt out"
    shares = [(parts, True) for parts in passes.mode.dealt(walker.first)]
    walker.step(run, passes, shares[0][0])
    if len(meshes) > 1:
        walker.step(*walker.open(meshes[-1]), shares[-1][0])
    return shares


def _walk_replicas(shape: MeshShape, meshes: Sequence[Mesh], walker: _Walker) -> list[_Share]:
    """Do the first step of the ranks of one replica. Ranks of another have parts of the same images, and the same
    messages: its first rank stands for all but those of the first replica."""
    each = shape.ranks // shape.replicas
    shares: list[_Share] = []
    dealt: Sequence[tuple[Part, ...]] = ()  # of tiles that are dealt to pipelines
    for mesh in meshes:
        first = mesh.rank - mesh.rank % each
        alike = each <= mesh.rank and (mesh.rank != first or bool(dealt))
        if alike or mesh.rank >= shape.ranks:
            position = open_axes(mesh, shape).position
            own = () if position is None else dealt[position.replica] if dealt else shares[first][0]
            shares.append((own, position is not None and shares[mesh.rank % each][1]))
            continue
        run, passes = walker.open(mesh, mesh.rank < each)
        own = passes.mode.share(walker.first)
        shares.append((own, passes.loads))
        if mesh.rank < each:
            walker.step(run, passes, own)
        if not dealt and type(passes.mode) is ReadMode:
            dealt = passes.mode.dealt(walker.first)
    return shares


class _NoValues:
    """Pixels as if they had been sent to the device."""

    def __init__(self, bands: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self._x_CHW = torch.empty(bands, *shape, device=_META, dtype=dtype)

    def await_all(self) -> tuple[torch.Tensor, None]:
        return self._x_CHW, None


class _Sum:
    """A loss: the sum of all outputs."""

    looks_first = False

    def look(self, piece: Piece, sample: Sample) -> None:
        """Do nothing: it does not look first."""

    def agree(self) -> None:
        """Do nothing: there is nothing to agree on."""

    def __call__(self, pieces: Sequence[tuple[Piece, Sample]]) -> torch.Tensor:
        return torch.stack([made.sum() for piece, _ in pieces for made in (piece.logits_BKHW, *piece.others)]).sum()


class _Walker:
    """The network, without values, and the first step: opened and done by one rank after the other."""

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
                module.eval()  # it draws values, and sends nothing
        return network

    def open(self, mesh: Mesh, runs: bool = True) -> tuple[ParallelRun, Passes]:
        """Open a rank's axes and passes, as a run does. In stages a rank that `runs` has a network of its own."""
        plan = self._preparation.plan
        network = self._network() if plan.pipeline and runs else self._whole
        run = ParallelRun.open(plan.spread, network, mesh, self._precision, plan.pipeline)
        return run, run.over(plan.tilings, plan.tiles_per_batch)

    def step(self, run: ParallelRun, passes: Passes, own: Sequence[Part]) -> None:
        """Do a step with one part of each size among a rank's own, in stages with so many that a schedule repeats."""
        plan = self._preparation.plan
        first_of_size = {plan.tilings[part.image].raster: part for part in reversed(own)}
        parts = (
            own[: 4 * plan.spread.mesh.stages] if plan.spread.mesh.stages > 1 else list(first_of_size.values())[::-1]
        )
        reducer = GradientReducer(passes.mode.network.parameters(), run.axes.weights)
        reducer.zero()
        samples = map(self._sample, parts)
        passes.train(samples, parts, lambda image: DropoutKey(0, 0, image), _Sum(), reducer)
        reducer.finish()
        reducer.close()

    def _sample(self, part: Part) -> Sample:
        shape, dtype = part.tile.context.shape, PARAMETER_DTYPES[self._precision]
        carried = _NoValues(self._preparation.plan.network.bands, shape, dtype)
        return Sample(part.image, part.tile, np.empty(0), None, np.empty(0, bool), carried=carried)
