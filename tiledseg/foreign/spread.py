"""A module whose work the ranks of a process group share: what `parallelize` and `Pipeline` have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Self

import torch
from torch import nn

from tiledseg.comm.axes import Axes, open_axes
from tiledseg.comm.collectives import Communicator
from tiledseg.comm.failure import mark_agreed
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.session import joined_mesh
from tiledseg.errors import ConfigError, GeometryError
from tiledseg.execution.memory import free_memory
from tiledseg.geometry.sharing.decomposition import MeshShape
from tiledseg.gradients import sum_gradients
from tiledseg.models.dropout import DropoutKey
from tiledseg.models.network import GraphNetwork
from tiledseg.system.console import say

_SHARED = "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_load_state_dict_post_hooks"


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
            shape = _shape(mesh.size, rows, cols, stages)
            axes = open_axes(mesh, shape)
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

    def verify(self, network: GraphNetwork, x_BCHW: torch.Tensor | None, together: Communicator) -> None:
        """End the run, on all ranks of `together`, where one of them finds that a traced network does not give what its
        module gives on `x_BCHW`, taken for an image of its own. Collective: ranks look by themselves, without a
        message, and then gather their verdicts once, so nothing can wait forever."""
        from tiledseg.tracing.agreement import verified

        error = None
        try:
            if x_BCHW is not None:
                device = next(network.recorded.module.parameters(), x_BCHW).device
                line = verified(network, x_BCHW.to(device), free_memory(self.mesh, device))
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


def _shape(ranks: int, rows: int, cols: int, stages: int) -> MeshShape:
    """Return the mesh of ranks. Raise ConfigError, on all ranks alike, where ranks would be left over."""
    image = rows * cols * stages
    if min(rows, cols, stages) < 1:
        raise mark_agreed(ConfigError(f"mesh ({rows}, {cols}) with {stages} stages; give at least 1 each"))
    if ranks % image:
        what = f"{f'stages {stages}' if stages > 1 else f'mesh ({rows}, {cols})'} takes {image} ranks an image"
        raise mark_agreed(ConfigError(f"{what}, but the job has {ranks}; start a multiple of {image}"))
    return MeshShape(ranks // image, rows, cols, stages)
