"""The set-up and the first step of the ranks of a job, one after the other in one process, by the code that a run's
ranks execute.

Without GPUs and peers: tensors have a shape and no values (torch's device `meta`), and what ranks would say to each
other is written down and matched (`comm.transports.rehearsed`). The axes and the share of the first step are those of
every rank. Forward and backward passes with their messages and sums are walked by the ranks of one replica, for each
size of image, in stages for so many micro-batches that the schedule repeats itself: the other replicas do the same,
some ranks further on. Where tiles are dealt out the first rank and the last one are walked.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tiledseg.comm.axes import open_axes
from tiledseg.comm.launch import Launch, open_files_needed, store_operations
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.rehearsed import Doings, RehearsedCommunicator, unmatched
from tiledseg.comm.watching.verdict import name_ranks
from tiledseg.execution.halos.halo_modes import ReadMode
from tiledseg.execution.halos.part import Part, Piece
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.passes.part_passes import Passes
from tiledseg.execution.precision import CAST_DTYPES, PARAMETER_DTYPES
from tiledseg.geometry.sharing.mesh_shape import MeshShape
from tiledseg.gradients import GradientReducer
from tiledseg.models.dropout import ChannelDropout, DropoutKey
from tiledseg.models.network import GraphNetwork
from tiledseg.planning.run.plan import balanced
from tiledseg.raster.samples.dataset import Sample
from tiledseg.raster.samples.sampling import Position
from tiledseg.tracing.build import network_modules
from tiledseg.training.preparing.preparation import Preparation, why_uncompiled
from tiledseg.units.widths import SINGLE_BYTES

_META = torch.device("meta")


@dataclass(frozen=True)
class Walked:
    """What the ranks of a job would do. `parts` of the first step, and `rasters` opened for them, by rank; `groups`
    and `peers`: how many a rank is in, and has; `messages`, `bytes`: of the passes that are walked, the most of any
    rank, and so `sums` and `summed`, of norms and gradients; `faults`: what does not match."""

    parts: tuple[int, ...]
    rasters: tuple[int, ...]
    groups: int
    peers: int
    messages: int
    bytes: int
    sums: int
    summed: int
    faults: tuple[str, ...]


def walk(preparation: Preparation, ranks: int, per_node: int) -> Walked:
    """Raises InputError where a rank's own set-up is refused. A balance that waits for times is by multiply-adds."""
    if preparation.plan.spread.mesh.stages > 1 and preparation.plan.pipeline is None:
        preparation = replace(preparation, plan=balanced(preparation.question, preparation.plan))
    meshes, doings = _meshes(ranks, per_node)
    shares = _Shares(preparation)
    shape = preparation.plan.spread.mesh
    if preparation.plan.spread.shares_images or shape.stages > 1:
        mine = _of_replicas(shape, meshes, shares)
    else:
        run, passes = shares.open(meshes[0])
        assert isinstance(passes.mode, ReadMode), "tiles are dealt out"
        mine = [(parts, True) for parts in passes.mode.dealt(shares.first)]
        shares.step(run, passes, mine[0][0])
        if ranks > 1:
            shares.step(*shares.open(meshes[-1]), mine[-1][0])
    return Walked(
        tuple(len(parts) for parts, _ in mine),
        tuple(len({part.image for part in parts}) if reads else 0 for parts, reads in mine),
        1 + max(len(done.groups) for done in doings.values()),
        max(len(done.sent.keys() | done.received.keys()) for done in doings.values()),
        max(sum(map(len, done.sent.values())) for done in doings.values()),
        max(sum(map(sum, done.sent.values())) for done in doings.values()),
        max(sum(map(len, done.summed.values())) for done in doings.values()),
        max(sum(map(sum, done.summed.values())) for done in doings.values()),
        tuple(unmatched({rank: done for rank, done in doings.items() if done.sent or done.received or done.summed})),
    )


def _meshes(ranks: int, per_node: int) -> tuple[list[Mesh], dict[int, Doings]]:
    """Of each rank its mesh, and what it will have done."""
    doings = {rank: Doings() for rank in range(ranks)}
    launches = [
        Launch(first + local, ranks, local, on_node, "rehearsal")
        for first in range(0, ranks, per_node)
        for on_node in [min(per_node, ranks - first)]  # the last node may have fewer
        for local in range(on_node)
    ]
    communicators = [RehearsedCommunicator(rank, ranks, done) for rank, done in doings.items()]
    pairs = zip(launches, communicators, strict=True)
    return [Mesh(launch, own, _META, "rehearsal", "here") for launch, own in pairs], doings


class _NoValues:
    """Pixels as if they had been sent to the device."""

    def __init__(self, bands: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self._pixels_CHW = torch.empty(bands, *shape, device=_META, dtype=dtype)

    def await_all(self) -> tuple[torch.Tensor, None, None]:
        return self._pixels_CHW, None, None


class _Sum:
    """A loss: all that is there."""

    looks_first = False

    def look(self, piece: Piece, sample: Sample) -> None:
        """It does not look first."""

    def agree(self) -> None:
        """Nothing to agree on."""

    def __call__(self, pieces: Sequence[tuple[Piece, Sample]]) -> torch.Tensor:
        return torch.stack([made.sum() for piece, _ in pieces for made in (piece.logits_BKHW, *piece.others)]).sum()


class _Shares:
    """The network, without values, and the first step; what a rank makes of them."""

    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation
        given = preparation.recipe.precision
        self._precision = "fp32" if given in CAST_DTYPES else given  # tensors without values are not cast
        self.first = next(iter(preparation.sampler.steps_from(Position(0, 0), 1)))[1]
        self._whole = self._network()

    def _network(self) -> GraphNetwork:
        with _META:
            network = network_modules(self._preparation.plan.network, 0, still=self._preparation.recipe.still_norms)
        network.train()
        for module in network.modules():
            if isinstance(module, ChannelDropout):
                module.eval()  # it draws values, and sends nothing
        return network

    def open(self, mesh: Mesh, runs: bool = True) -> tuple[ParallelRun, Passes]:
        """A rank's passes, as a run opens them. Its axes are opened on the way. In stages a rank that `runs` has a
        network of its own, as the layers of the others are let go."""
        plan = self._preparation.plan
        network = self._network() if plan.pipeline and runs else self._whole
        run = ParallelRun.open(plan.spread, network, mesh, self._precision, plan.pipeline)
        return run, run.over(plan.tilings, plan.tiles_per_batch)

    def step(self, run: ParallelRun, passes: Passes, own: Sequence[Part]) -> None:
        """What a step does with parts of each size among a rank's own, in stages with so many that a schedule repeats
        itself."""
        stages = self._preparation.plan.spread.mesh.stages
        parts = own[: 4 * stages] if stages > 1 else list(self._each_size(own))
        reducer = GradientReducer(passes.mode.network.parameters(), run.axes.weights)
        reducer.zero()
        samples = map(self._sample, parts)
        passes.train(samples, parts, lambda image: DropoutKey(0, 0, image), _Sum(), reducer)
        reducer.finish()
        reducer.close()

    def _each_size(self, own: Sequence[Part]) -> Iterator[Part]:
        """Of parts that are alike in their image's size, the first."""
        seen = set()
        for part in own:
            size = self._preparation.plan.tilings[part.image].raster
            if size not in seen:
                seen.add(size)
                yield part

    def _sample(self, part: Part) -> Sample:
        shape, dtype = part.tile.context.shape, PARAMETER_DTYPES[self._precision]
        carried = _NoValues(self._preparation.plan.network.bands, shape, dtype)
        return Sample(part.image, part.tile, np.empty(0), None, np.empty(0, bool), carried=carried)


def _of_replicas(shape: MeshShape, meshes: Sequence[Mesh], shares: _Shares) -> list[tuple[tuple[Part, ...], bool]]:
    """Of each rank its parts, and whether it reads them. The ranks of one replica have parts of the same images, and
    the same messages as those of another: its first rank stands for all but those of the first replica."""
    each = shape.ranks // shape.replicas
    found: list[tuple[tuple[Part, ...], bool]] = []
    dealt: Sequence[tuple[Part, ...]] = ()  # of tiles that are dealt to pipelines
    for mesh in meshes:
        first = mesh.rank - mesh.rank % each
        alike = each <= mesh.rank and (mesh.rank != first or bool(dealt))
        if alike or mesh.rank >= shape.ranks:
            position = open_axes(mesh, shape).position
            own = () if position is None else dealt[position.replica] if dealt else found[first][0]
            found.append((own, position is not None and found[mesh.rank % each][1]))
            continue
        run, passes = shares.open(mesh, mesh.rank < each)
        own = passes.mode.share(shares.first)
        found.append((own, passes.loads))
        if mesh.rank < each:
            shares.step(run, passes, own)
        if not dealt and type(passes.mode) is ReadMode:
            dealt = passes.mode.dealt(shares.first)
    return found


@dataclass(frozen=True)
class Rehearsal:
    """`fails`: why the job would end, a line each; `warnings`: what it would waste. Bytes are those of one rank: of a
    step, and of the messages and sums of its passes on each size of image."""

    ranks: int
    mode: str
    mesh: str
    tiles: int
    idle: int
    memory: int
    rasters: int
    groups: int
    peers: int
    messages: int
    bytes: int
    sums: int
    summed: int
    open_files: int
    open_files_of_root: int
    store_operations: int
    seconds: float
    fails: tuple[str, ...]
    warnings: tuple[str, ...]


def rehearse(preparation: Preparation, ranks: int, per_node: int, gpu_memory: int) -> Rehearsal:
    """Walk a run that has been prepared for so many ranks. Raises InputError where a rank's own set-up is refused."""
    begun = time.perf_counter()
    walked = walk(preparation, ranks, per_node)
    spread, memory = preparation.plan.spread, preparation.plan.memory
    files, root = (open_files_needed(ranks, keeps, walked.peers) for keeps in (False, True))
    idle = [rank for rank, parts in enumerate(walked.parts) if not parts]
    notes = [f"{len(idle)} of {ranks} ranks have no part of the first step: {name_ranks(idle)}"] if idle else []
    if preparation.question.value_bytes < SINGLE_BYTES and walked.messages:
        notes.append(f"bytes of messages are those of fp32: up to twice what {preparation.recipe.precision} sends")
    return Rehearsal(
        ranks,
        spread.in_words,
        str(spread.mesh),
        sum(walked.parts),
        len(idle),
        memory,
        max(walked.rasters),
        walked.groups,
        walked.peers,
        walked.messages,
        walked.bytes,
        walked.sums,
        walked.summed,
        files,
        root,
        store_operations(ranks, walked.groups, walked.peers),
        time.perf_counter() - begun,
        (*_uncompiled(preparation), *_too_large(preparation, gpu_memory), *_files(root), *walked.faults[:5]),
        (*preparation.warnings, *notes),
    )


def _uncompiled(preparation: Preparation) -> list[str]:
    refused = why_uncompiled(preparation)
    return [refused] if refused else []


def _too_large(preparation: Preparation, gpu_memory: int) -> list[str]:
    needed = preparation.plan.memory
    if needed <= gpu_memory:
        return []
    return [
        f"a step needs {needed / 2**30:.2f} GiB on the rank that needs most, of {gpu_memory / 2**30:.2f} GiB; use a "
        "finer tiling.grid, more ranks an image, or memory.budget"
    ]


def _files(root: int) -> list[str]:
    """Return a line where rank 0 needs more open files than this machine allows, whose limit stands for the job's."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= root:
        return []
    return [f"rank 0 needs {root} open files, of {hard} that are allowed here; raise the limit (ulimit -n)"]


def in_words(found: Rehearsal) -> str:
    """A table, then what would fail, and the warnings."""
    rows = (
        ("halo mode", found.mode),
        ("mesh", found.mesh),
        ("parts of the first step", f"{found.tiles}, on {found.ranks - found.idle} ranks"),
        ("memory of a step", f"{found.memory / 2**20:.1f} MiB on the rank that needs most"),
        ("rasters a rank opens", f"at most {found.rasters}"),
        ("communicators a rank is in", f"at most {found.groups}"),
        (
            "messages, forward and back",
            f"at most {found.messages} to {found.peers} peers, {found.bytes} bytes",
        ),
        ("sums over ranks", f"at most {found.sums}, {found.summed} bytes: of gradients, and of norms"),
        ("open files", f"{found.open_files}; rank 0 {found.open_files_of_root}"),
        ("store", f"at most {found.store_operations} operations until the first step has ended"),
    )
    width = max(len(name) for name, _ in rows)
    lines = [f"{found.ranks} ranks rehearsed in {found.seconds:.1f} s", *(f"  {n:{width}}  {v}" for n, v in rows)]
    lines += [f"warning: {line}" for line in found.warnings]
    lines += [f"would fail: {line}" for line in found.fails] or ["nothing found that would fail"]
    return "\n".join(lines)
