"""`Pipeline`: a module whose layers are spread over ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiledseg.comm.failure import mark_agreed
from tiledseg.config.checks import MOST, Range, checked
from tiledseg.config.run import ParallelConfig
from tiledseg.errors import ConfigError
from tiledseg.foreign.spread import SpreadModule, check_images, trace
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.shapes import tensor_shapes
from tiledseg.models.dropout import DropoutKey, set_dropout_key
from tiledseg.models.layers.pixelwise import tensors_of
from tiledseg.models.network import GraphNetwork, Tensors
from tiledseg.pipeline.executor import PipelineExecutor
from tiledseg.pipeline.partition import split_network
from tiledseg.planning.run.pipeline import PipelinePlan, plan_pipeline
from tiledseg.planning.run.spread import MicroBatchSize, parallelism

Loss = Callable[..., torch.Tensor]
PIXELS = 256  # side of the image whose multiply-adds decide the automatic balance
IN_FLIGHT = 4  # micro-batches a stage, for the automatic balance


class Pipeline(SpreadModule):
    """A module whose layers are spread over `stages` ranks, `balance` many on each, or "auto" for the shortest step. A
    batch runs by `schedule` (1f1b, gpipe, folded), in micro-batches of `micro_batch` images; the last may be smaller.

    The pipeline takes the module over: a rank keeps the weights of its own stage, the others are on torch's `meta`
    device. `parameters()` still lists them, and optimizers skip them. The law: loss, gradients and buffers equal those
    of the micro-batches one after the other through the whole module. So a loss that is a sum over images does not
    depend on `micro_batch`, except with batch norms in training, which measure a micro-batch. Dropout depends on
    `seed`, the call and the image, not on the ranks.

    `verify`: the first call compares the traced network with the module, of which the first stage keeps a copy until
    then (docs/explanation/exactness.md).

    Raises ConfigError that lists every operation of the module that cannot be exact, or if balance, schedule or number
    of ranks do not fit, before any weight is dropped. Collective.
    """

    @checked
    def __init__(
        self,
        module: nn.Module,
        stages: int,
        balance: str | list[int] = "auto",
        schedule: str = "1f1b",
        *,
        bands: int | None = None,
        micro_batch: int = 1,
        seed: int = 0,
        verify: bool = True,
    ) -> None:
        Range(2, MOST).check("stages", stages)
        Range(1, MOST).check("micro_batch", micro_batch)
        parallel = ParallelConfig(stages=stages, balance=balance, schedule=schedule)
        parallel.check()
        network = trace(module, bands)
        plan = _plan(network, parallel)
        cut, modules = plan.cut(network.graph), list(network.layers.values())
        pairs = [(stage, index) for stage in set(cut.ranks) for index in cut.layers_of(stage)]
        holder = {id(tensor): stage for stage, index in pairs for tensor in tensors_of(modules[index])}
        named = {name: id(tensor) for name, tensor in network.state_dict(keep_vars=True).items()}
        stage_of = {name: holder[each] for name, each in named.items() if each in holder}
        super().__init__(network, 1, 1, stages, seed)
        self.micro_batch = micro_batch
        self.balance, self._stage_of, self._last = plan.balance, stage_of, cut.ranks[-1]
        self._verifies = verify and network.recorded is not None
        # In a tuple, so that it is no submodule. The first stage has the images.
        self._whole = (copy.deepcopy(network),) if self._verifies and self.stage == 0 else ()
        dtype = next(network.parameters()).dtype
        self._split = split_network(network, plan, self.stage, self.mesh.device, dtype)
        self._executor = PipelineExecutor(self._split, self.axes)
        if network.origin:
            network.origin.renew()

    @property
    def stage(self) -> int:
        """Return the stage of this rank, from 0."""
        assert self.axes.position is not None, "no rank is idle"
        return self.axes.position.stage

    def step(self, x_BCHW: torch.Tensor, target: torch.Tensor, loss: Loss) -> torch.Tensor:
        """Run the forward and backward passes of a batch, and add to the gradients of this rank's weights. Return the
        sum of the micro-batches' losses. Collective over the ranks of the pipeline.

        The last stage calls `loss(returned, target[i:j])` for each micro-batch, of images i to j, with the module's
        output. Every rank passes `x_BCHW` and `target` of the same shapes; the first stage reads the values of
        `x_BCHW`, the last those of `target`. With replicas, call `reduce_gradients` afterwards.
        """
        own, layers = self.network.own_gradients, self.network.layers.values()
        pairs = zip(self.network.graph.nodes, layers, strict=True)
        moving = next((node.name for node, each in pairs if node.layer.statistics == "batch" and each.training), None)
        norm = f"'{moving}' is a batch norm, which would move its statistics on each of {self.replicas} replicas"
        faults = {
            f"{norm}; use all ranks for one pipeline, or .eval() of the norms": bool(moving) and self.replicas > 1,
            f"the module cannot be trained in stages: {own}": bool(own),
            f"{len(x_BCHW)} images have {len(target)} targets; give each image one": len(target) != len(x_BCHW),
        }
        self._check(x_BCHW, faults)
        self._verify(x_BCHW)
        batch = self._cut(x_BCHW, target, loss)
        self._executor.train(batch, lambda parameters: None)
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for micro_batch in batch:
            total += micro_batch.lost
        self.axes.pipeline.all_reduce_sum(total).wait()
        return total

    def _verify(self, x_BCHW: torch.Tensor) -> None:
        """Compare the network with its module at the first call, on a micro-batch."""
        if self._verifies:
            sample_BCHW = x_BCHW[: self.micro_batch] if self._whole else None
            for network in self._whole:
                for own, part in zip(network.modules(), self.network.modules(), strict=True):
                    own.training = part.training
            whole = len(x_BCHW), tuple(x_BCHW.shape[2:])
            self.verify(*self._whole or (self.network,), sample_BCHW, whole, self.axes.pipeline)
            self._verifies, self._whole = False, ()

    def _cut(
        self, x_BCHW: torch.Tensor, target: torch.Tensor | None = None, loss: Loss | None = None
    ) -> list[_StagedForeign]:
        keys = self.dropout_keys(len(x_BCHW))
        cuts = [slice(i, i + self.micro_batch) for i in range(0, len(x_BCHW), self.micro_batch)]
        shapes = tensor_shapes(self.network.graph, self.network.bands, *x_BCHW.shape[2:])  # refused on all ranks alike
        targets = [target if target is None else target[at] for at in cuts]
        pairs = zip(cuts, targets, strict=True)
        return [_StagedForeign(self, shapes, x_BCHW[at], keys[at], own, loss) for at, own in pairs]

    def _check(self, x_BCHW: torch.Tensor, faults: Mapping[str, bool] | None = None) -> None:
        """Raise ConfigError on all ranks for a fault that only one stage would meet while the others wait for it.
        `faults`: further messages, and True for those that hold."""
        self.network.check_origin()
        check_images(x_BCHW.shape, self.network.bands)
        dtype, made = next(self.network.parameters()).dtype, self._split.dtypes[0]
        autocast = torch.is_autocast_enabled(self.mesh.device.type)
        lines = {
            f"the pipeline was made of {made} weights, which are {dtype} now; convert the module before": dtype != made,
            f"autocast is on, but the stages send each other {made}; turn it off, or convert the module": autocast,
            f"the images are {x_BCHW.dtype}, but the weights {made}; convert them": x_BCHW.dtype != made,
        }
        for line, holds in {**(faults or {}), **lines}.items():
            if holds:
                raise mark_agreed(ConfigError(line))

    @torch.no_grad()
    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the module's (first) output for a batch, without gradients, on every rank."""
        self._check(x_BCHW)
        self._verify(x_BCHW)
        made = [outputs_BKHW[0] for _, outputs_BKHW in self._executor.outputs(self._cut(x_BCHW))]
        result = self.network.graph.results[0]
        shape = len(x_BCHW), *tensor_shapes(self.network.graph, self.network.bands, *x_BCHW.shape[2:])[result]
        output_BKHW = torch.cat(made).contiguous() if made else torch.empty(shape, dtype=self._split.dtypes[result])
        output_BKHW = output_BKHW.to(self.mesh.device)
        self.axes.pipeline.broadcast(output_BKHW, self._last)
        return output_BKHW

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Return all weights and buffers by the module's names, on the CPU of every rank. Collective over the pipeline:
        each tensor is broadcast by its stage, in the order of names."""
        whole = {}
        for name, tensor in super().state_dict(*args, **kwargs).items():
            whole[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            if not tensor.is_meta:
                whole[name].copy_(tensor)
            self.axes.pipeline.broadcast(whole[name], self._stage_of.get(name, 0))
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy this rank's weights and buffers, as torch's method does."""
        with warnings.catch_warnings():  # torch warns of each weight of another stage
            warnings.simplefilter("ignore")
            return super().load_state_dict(state_dict, strict)


@dataclass
class _StagedForeign:
    """A micro-batch for the executor, with a dropout key for each image."""

    pipeline: Pipeline
    shapes: tuple[tuple[int, int, int], ...]
    x_BCHW: torch.Tensor
    keys: Sequence[DropoutKey]
    target: torch.Tensor | None = None
    criterion: Loss | None = None
    lost: float | torch.Tensor = 0.0

    @property
    def images(self) -> int:
        return len(self.x_BCHW)

    def source(self) -> torch.Tensor:
        return self.x_BCHW.to(self.pipeline.mesh.device).contiguous(memory_format=torch.channels_last)

    def run_nodes(self, tensors: Tensors, first: int, stop: int) -> None:
        set_dropout_key(self.pipeline.network, *self.keys)
        self.pipeline.network.run_nodes(tensors, first, stop)

    def loss(self, *outputs_BKHW: torch.Tensor) -> torch.Tensor:
        assert self.criterion is not None, "a pass without gradients takes no loss"
        assert self.target is not None, "a loss has a target"
        loss = self.criterion(self.pipeline.network.returned(outputs_BKHW), self.target.to(self.pipeline.mesh.device))
        self.lost = loss.detach().double()
        return loss


def _plan(network: GraphNetwork, parallel: ParallelConfig) -> PipelinePlan:
    footprint = network_footprint(network.graph)
    side = footprint.before + footprint.after + footprint.alignment * max(1, PIXELS // footprint.alignment)
    size = MicroBatchSize((side, side), IN_FLIGHT * parallel.stages, 4)
    return plan_pipeline(parallelism(parallel), network.graph, network.bands, size, None)
