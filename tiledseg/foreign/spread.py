"""Any module as a graph, the halo of its tiles, and `SpreadModule`, the base of `ParallelModule` and `Pipeline`: a
module whose work the ranks of a process group share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn

from tiledseg.comm.collectives import Communicator
from tiledseg.comm.failure import mark_agreed
from tiledseg.comm.mesh import Axes, Mesh, open_axes
from tiledseg.comm.session import joined_mesh
from tiledseg.config.checks import checked, shown
from tiledseg.errors import ConfigError, GeometryError
from tiledseg.execution.memory import free_memory
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.halo import Footprint, minimum_halo, network_footprint
from tiledseg.geometry.sharing.decomposition import MeshShape
from tiledseg.gradients import sum_gradients
from tiledseg.models.dropout import DropoutKey
from tiledseg.models.network import GraphNetwork
from tiledseg.planning.run.spread import measuring
from tiledseg.system.console import say

Shape = tuple[int, ...]
_SHARED = "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_load_state_dict_post_hooks"


@dataclass(frozen=True)
class Halo:
    """The halo of a network's tiles, in pixels along either dim.

    Core edges lie on multiples of `alignment`. `minimum`: width of the border around a core that its outputs depend on;
    `halo`: width of the border of tiles, extended to a legal input size. Both are the larger side's; `sides` and
    `minimum_sides` are (above and left, below and right). `footprint` cuts tiles. `asks_place`: outputs depend on a
    tile's position in the image, which our networks know, and a module called on tiles does not. `whole_image`: names
    of nodes that see the whole image in evaluation too (a mean, statistics), which no halo covers.
    """

    minimum: int
    halo: int
    alignment: int
    minimum_sides: tuple[int, int]
    sides: tuple[int, int]
    whole_image: tuple[str, ...]
    footprint: Footprint = field(repr=False)
    asks_place: bool = field(repr=False)

    @staticmethod
    def of(graph: Graph) -> Halo:
        """Return the halo of a graph. Raise GeometryError if no exact tile exists."""
        least, footprint = minimum_halo(graph), network_footprint(graph)
        sides = footprint.before, footprint.after
        whole_image = tuple(node.name for node in measuring(graph, trains=False))
        asks_place = any(layer.asks_place for layer in graph.layers)
        return Halo(max(least), max(sides), footprint.alignment, least, sides, whole_image, footprint, asks_place)


@checked
def halo(network: Any, bands: int | None = None) -> Halo:
    """Return the halo of a module, or of a result of `load`. `bands`: of its images (None: those of its first
    convolution).

    Raises ConfigError with a list of all operations that are not exact on tiles, GeometryError if no exact tile exists.
    """
    module = getattr(network, "network", network)
    if not isinstance(module, nn.Module):
        what = f"give nn.Module or a result of load, not {type(module).__name__} (tiledseg.halo)"
        raise ConfigError(f"network is {shown(module)}; {what}")
    return Halo.of(trace(module, bands).graph)


@checked
def trace(module: nn.Module, bands: int | None = None) -> GraphNetwork:
    """Return any convolutional module as a graph, with the same weights under the same names; a graph unchanged.

    `bands`: of its input (None: those of its first convolution). Raises ConfigError that lists every operation that is
    not exact on tiles, with reason and remedy.
    """
    if isinstance(module, GraphNetwork):
        return module
    from tiledseg.tracing.trace import trace as traced

    if bands is None:
        bands = next((each.in_channels for each in module.modules() if isinstance(each, nn.Conv2d)), None)
    if bands is None:
        raise ConfigError(f"{type(module).__name__} has no convolution to read its bands from; give bands=")
    return traced(module, bands)


class SpreadModule(nn.Module):
    """A module with the weights, buffers and submodules of a traced one: the same objects under the same names, so
    optimizers and checkpoints see no difference.

    `rows` x `cols` x `stages` ranks compute an image; further groups of ranks are replicas. Joins torch's process
    group, or opens one over the launcher's ranks. Collective, like `close`.

    Dropout drops whole channels, drawn by `seed`, `calls` and the image's number among all replicas, so all ranks of an
    image drop the same. `calls` counts the calls in training; set it when a run is resumed.
    """

    network: GraphNetwork
    mesh: Mesh
    axes: Axes

    def __init__(self, network: GraphNetwork, rows: int, cols: int, stages: int, seed: int) -> None:
        super().__init__()
        self.__dict__ |= {kind: network.__dict__[kind] for kind in (*_SHARED, "training")}
        self.seed, self.calls = seed, 0
        with ExitStack() as opened:
            mesh = opened.enter_context(joined_mesh())
            image = rows * cols * stages
            if min(rows, cols, stages) < 1:
                raise mark_agreed(ConfigError(f"mesh ({rows}, {cols}) with {stages} stages; give at least 1 each"))
            if mesh.size % image:
                what = f"{f'stages {stages}' if stages > 1 else f'mesh ({rows}, {cols})'} takes {image} ranks an image"
                raise mark_agreed(ConfigError(f"{what}, but the job has {mesh.size}; start a multiple of {image}"))
            axes = open_axes(mesh, MeshShape(mesh.size // image, rows, cols, stages))
            opened.callback(axes.close)
            self._held = opened.pop_all()
        self.__dict__ |= {"network": network, "mesh": mesh, "axes": axes}  # not registered as submodules

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self.network._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode. Raise ConfigError if the network can only map."""
        self.network.train(mode)
        self.training = mode
        return self

    @property
    def replicas(self) -> int:
        """Return the number of groups of ranks that compute images at the same time."""
        return self.axes.shape.replicas

    @property
    def replica(self) -> int:
        """Return the number, from 0, of this rank's replica."""
        assert self.axes.position is not None, "no rank is idle"
        return self.axes.position.replica

    def dropout_keys(self, images: int) -> list[DropoutKey]:
        """Return the dropout key of each of this replica's images, and count the call if in training."""
        first, call = self.replica * images, self.calls
        self.calls += self.training
        return [DropoutKey(self.seed, call, first + image) for image in range(images)]

    def reduce_gradients(self) -> None:
        """Sum each weight's gradient over all ranks in float64. Collective: call it after the last backward pass of a
        step, before the optimizer's step, in place of other reductions such as torch's DDP.

        No deadlock: it is one all-reduce, of the same weights in the same order on all ranks.
        """
        sum_gradients((p for p in self.parameters() if not p.is_meta), self.axes.weights)

    def verify(
        self, network: GraphNetwork, x_BCHW: torch.Tensor | None, whole: tuple[int, Shape], together: Communicator
    ) -> None:
        """Raise ConfigError on all ranks of `together` if, on one of them, a traced network and its module differ on
        `x_BCHW`, taken for an image of its own, or the module runs other operations for `whole` images (number, shape).
        Collective; no deadlock: ranks check without messages, and then gather their verdicts once."""
        from tiledseg.tracing.compare import verified

        error = None
        try:
            if x_BCHW is not None:
                device = next(network.recorded.module.parameters(), x_BCHW).device
                line = verified(network, x_BCHW.to(device), free_memory(self.mesh, device), wholes=[whole])
                if self.mesh.is_root:
                    say(line)
        except ConfigError as caught:
            error = caught
        for verdict in together.gather_objects(error and str(error)):
            if verdict is not None:
                raise mark_agreed(ConfigError(verdict))

    def close(self) -> None:
        """Close the communicators; the module cannot run afterwards. The process group stays. Collective."""
        self._held.close()


def check_images(shape: Sequence[int], bands: int) -> None:
    """Raise GeometryError, on all ranks alike, unless `shape` is that of images with so many bands, before any rank
    waits for a message."""
    if len(shape) != 4 or shape[1] != bands:
        what = f"the images have the shape {tuple(shape)}, but the network takes (batch, {bands}, height, width)"
        raise mark_agreed(GeometryError(what))
