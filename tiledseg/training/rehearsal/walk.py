"""The set-up of every rank of a job, one after the other in one process, by the code that a run's ranks execute.

Without GPUs and peers: tensors have a shape and no values (torch's device `meta`), and what ranks would say to each
other is written down and matched (`comm.rehearsed`). The axes and the share of the first step are those of every rank;
a forward pass with its messages is walked by the ranks of one replica, for each size of image: the other replicas do
the same, some ranks further on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tiledseg.comm.axes import open_axes
from tiledseg.comm.launch import Launch
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.rehearsed import Doings, RehearsedCommunicator, unmatched
from tiledseg.errors import ConfigError
from tiledseg.execution.halo_modes import ExchangeMode, LayerMode, Part, ReadMode
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.passes import Passes
from tiledseg.raster.sampling import Position
from tiledseg.tracing.build import network_modules
from tiledseg.training.preparation import Preparation

_META = torch.device("meta")


@dataclass(frozen=True)
class Walked:
    """What the ranks of a job would do. `parts` of the first step, and `rasters` opened for them, by rank; `groups`
    and `peers`: how many a rank is in, and has; `messages`, `bytes`: of a forward pass, the most of any rank;
    `faults`: messages that do not match."""

    parts: tuple[int, ...]
    rasters: tuple[int, ...]
    groups: int
    peers: int
    messages: int
    bytes: int
    faults: tuple[str, ...]


def walk(preparation: Preparation, ranks: int, per_node: int) -> Walked:
    """Raises InputError where a rank's own set-up is refused, and ConfigError for a run in stages."""
    if preparation.question.parallel.stages > 1:
        raise ConfigError(
            f"a rehearsal walks no pipelines, and parallel.stages is {preparation.question.parallel.stages}; leave it "
            "at 1"
        )
    meshes, doings = _meshes(ranks, per_node)
    shares = _Shares(preparation)
    if preparation.plan.spread.shares_images:
        mine = _of_shared_images(preparation, meshes, shares)
    else:
        mode = shares.mode_of(meshes[0])[0].mode
        assert isinstance(mode, ReadMode), "tiles are dealt out"
        mine = [(parts, True) for parts in mode.dealt(shares.first)]
    return Walked(
        tuple(len(parts) for parts, _ in mine),
        tuple(len({part.image for part in parts}) if reads else 0 for parts, reads in mine),
        1 + max(len(done.groups) for done in doings.values()),
        max(len(done.sent.keys() | done.received.keys()) for done in doings.values()),
        max(sum(map(len, done.sent.values())) for done in doings.values()),
        max(sum(map(sum, done.sent.values())) for done in doings.values()),
        tuple(unmatched({rank: done for rank, done in doings.items() if done.sent or done.received})),
    )


def _meshes(ranks: int, per_node: int) -> tuple[list[Mesh], dict[int, Doings]]:
    """Of each rank its mesh, and what it will have done."""
    doings = {rank: Doings() for rank in range(ranks)}
    launches = [Launch(rank, ranks, rank % per_node, per_node, "rehearsal") for rank in range(ranks)]
    communicators = [RehearsedCommunicator(rank, ranks, done) for rank, done in doings.items()]
    pairs = zip(launches, communicators, strict=True)
    return [Mesh(launch, own, _META, "rehearsal", "here") for launch, own in pairs], doings


class _Shares:
    """The network, without values, and the first step; what a rank makes of them."""

    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation
        with _META:
            network = preparation.plan.network
            self.network = network_modules(network, 0, still=preparation.recipe.still_norms)
        self.network.eval()  # dropout draws values, and sends nothing
        self.first = next(iter(preparation.sampler.steps_from(Position(0, 0), 1)))[1]

    def mode_of(self, mesh: Mesh) -> tuple[Passes, tuple[Part, ...]]:
        """A rank's passes, as a run opens them, and its share of the first step. Its axes are opened on the way."""
        plan = self._preparation.plan
        run = ParallelRun.open(plan.spread, self.network, mesh, self._preparation.recipe.precision)
        passes = run.over(plan.tilings, plan.tiles_per_batch)
        return passes, passes.mode.share(self.first)


def _of_shared_images(
    preparation: Preparation, meshes: Sequence[Mesh], shares: _Shares
) -> list[tuple[tuple[Part, ...], bool]]:
    """Of each rank its parts, and whether it reads them. The ranks of one replica have parts of the same images, and
    the same messages as those of another: its first rank stands for all but those of the first replica."""
    shape = preparation.plan.spread.mesh
    found: list[tuple[tuple[Part, ...], bool]] = []
    for mesh in meshes:
        first = mesh.rank - mesh.rank % shape.ranks_per_image
        if (shape.ranks_per_image <= mesh.rank and mesh.rank != first) or mesh.rank >= shape.ranks:
            inside = open_axes(mesh, shape).position is not None
            found.append((found[first][0], found[mesh.rank % shape.ranks_per_image][1]) if inside else ((), False))
            continue
        passes, own = shares.mode_of(mesh)
        found.append((own, passes.mode.reader))
        if mesh.rank < shape.ranks_per_image:
            for part in _each_size(preparation, own):
                _forward(passes, part, shares.network.bands, len(shares.network.graph.layers))
    return found


def _each_size(preparation: Preparation, own: Sequence[Part]) -> Iterator[Part]:
    """Of parts that are alike in their image's size, the first."""
    seen = set()
    for part in own:
        size = preparation.plan.tilings[part.image].raster
        if size not in seen:
            seen.add(size)
            yield part


def _forward(passes: Passes, part: Part, bands: int, nodes: int) -> None:
    """The messages of one part's way through the network."""
    mode = passes.mode
    dtype = next(mode.network.parameters()).dtype
    x_BCHW = torch.empty(1, bands, *part.tile.context.shape, device=_META, dtype=dtype)
    with torch.no_grad():
        if isinstance(mode, ExchangeMode):
            for _ in mode.of_block(x_BCHW, part.image, part.tile.position):
                pass
        elif isinstance(mode, LayerMode):
            (micro_batch,) = mode.micro_batches(part)
            mode.run_nodes(micro_batch, {0: x_BCHW}, 0, nodes)
