"""Any module as a graph, the one seam to `tracing`, and the halo that its tiles need; a module whose work the ranks of
a process group share, of which `parallelize` and `Pipeline` are kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from tiledseg.comm.collectives import Communicator
from tiledseg.comm.failure import mark_agreed
from tiledseg.comm.mesh import Axes, Mesh, open_axes
from tiledseg.comm.session import joined_mesh
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
    """The halo that a network needs around a tile, in pixels along either dim.

    Core edges lie on multiples of `alignment`. `minimum`: the pixels around a core that its outputs depend on, and no
    fewer; `halo`: those that tiles get, to a legal size of the network's input. Both are the larger side's; `sides` and
    `minimum_sides` are pixels (above and left, below and right). `footprint` is what cuts tiles. `asks_place`: the
    network must know where in the image a tile lies, as ours do, and a module that is called on tiles alone does not.
    `whole_image`: names of nodes that see the whole image in evaluation too (a mean, statistics): no halo covers that.
    """

    minimum_sides: tuple[int, int]
    footprint: Footprint
    asks_place: bool = False
    whole_image: tuple[str, ...] = ()

    @staticmethod
    def of(graph: Graph) -> Halo:
        """Return the halo of a graph. Raise GeometryError where no exact tile exists."""
        asks = any(layer.asks_place for layer in graph.layers)
        whole_image = tuple(node.name for node in measuring(graph, trains=False))
        return Halo(minimum_halo(graph), network_footprint(graph), asks, whole_image)

    def __repr__(self) -> str:
        sides = f"minimum_sides={self.minimum_sides}, sides={self.sides}"
        besides = f", whole_image={self.whole_image}" if self.whole_image else ""
        return f"Halo(minimum={self.minimum}, halo={self.halo}, alignment={self.alignment}, {sides}{besides})"

    @property
    def minimum(self) -> int:
        """Return the pixels around a core that its outputs depend on."""
        return max(self.minimum_sides)

    @property
    def halo(self) -> int:
        return max(self.sides)

    @property
    def sides(self) -> tuple[int, int]:
        return self.footprint.before, self.footprint.after

    @property
    def alignment(self) -> int:
        return self.footprint.alignment


def traced(module: nn.Module, bands: int | None = None) -> GraphNetwork:
    """Return the module as a network with the same weights; one of ours is that already.

    `bands`: None for those that its first convolution takes. Raises ConfigError that lists every place that is not
    exact.
    """
    if isinstance(module, GraphNetwork):
        return module
    if not isinstance(module, nn.Module):
        raise ConfigError(f"a {type(module).__name__} is no torch.nn.Module; give one, built")
    from tiledseg.tracing.trace import trace

    if bands is None:
        bands = next((each.in_channels for each in module.modules() if isinstance(each, nn.Conv2d)), None)
    if bands is None:
        raise ConfigError(f"{type(module).__name__} has no convolution that tells its bands; give bands=")
    return trace(module, bands)


class SpreadModule(nn.Module):
    """A module whose weights, buffers and submodules are those of a traced one, the same objects under the same names:
    optimizers and checkpoints see no difference.

    `rows` x `cols` x `stages` ranks work on an image; as many such groups as there are ranks for are its replicas.
    Joins torch's process group, or opens one over the launcher's ranks. Collective, as is `close`.

    Dropout drops whole channels, drawn by `seed`, `calls` and the image's number among those of all replicas, so that
    the ranks of an image drop the same. `calls` counts the calls in training so far: set it where a run goes on.
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
        self.__dict__ |= {"network": network, "mesh": mesh, "axes": axes}  # no submodules

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self.network._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the module. Raise ConfigError for one that only maps."""
        self.network.train(mode)
        self.training = mode
        return self

    @property
    def replicas(self) -> int:
        """Return the number of images that are worked on at once."""
        return self.axes.shape.replicas

    @property
    def replica(self) -> int:
        """Return the number of this rank's image among them."""
        assert self.axes.position is not None, "every rank has a place"
        return self.axes.position.replica

    def dropout_keys(self, images: int) -> list[DropoutKey]:
        """Return the key of each of this replica's images in this call, which is counted in training."""
        first, call = self.replica * images, self.calls
        self.calls += self.training
        return [DropoutKey(self.seed, call, first + image) for image in range(images)]

    def reduce_gradients(self) -> None:
        """Give each weight the sum of its gradients over all ranks, taken in float64. Collective: call it after the
        last backward pass of a step, before the optimizer's step, in place of other reductions (torch's DDP, say).

        It is one all-reduce, of the same weights in the same order on all ranks: nothing can wait forever.
        """
        sum_gradients((p for p in self.parameters() if not p.is_meta), self.axes.weights)

    def verify(
        self, network: GraphNetwork, x_BCHW: torch.Tensor | None, whole: tuple[int, Shape], together: Communicator
    ) -> None:
        """End the run, on all ranks of `together`, where one of them finds that a traced network does not give what its
        module gives on `x_BCHW`, taken for an image of its own, or calls others for the `whole` images (their number,
        and rows and columns). Collective: ranks look by themselves, without a message, and then gather their verdicts
        once, so nothing can wait forever."""
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
        for found in together.gather_objects(error and str(error)):
            if found is not None:
                raise mark_agreed(ConfigError(found))

    def close(self) -> None:
        """End the communicators. The process group stays; a module that has been closed runs no more. Collective."""
        self._held.close()


def check_images(shape: Sequence[int], bands: int) -> None:
    """Raise GeometryError, on all ranks, which are given the same shape, where it is not that of images of so many
    bands: before a rank waits for a message that another one does not send."""
    if len(shape) != 4 or shape[1] != bands:
        what = f"the images have the shape {tuple(shape)}, but the network takes (batch, {bands}, height, width)"
        raise mark_agreed(GeometryError(what))
