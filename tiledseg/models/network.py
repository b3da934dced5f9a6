"""The trained network: the modules of a graph's nodes, and the interpreter that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tiledseg.architecture.network import Network
from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import OFFLOAD, Graph, MemoryPolicy
from tiledseg.geometry.memory_policy import keep_all
from tiledseg.geometry.shapes import PooledBranch, tensor_channels, total_stride
from tiledseg.models.blocks import BUILDERS, ModuleSite
from tiledseg.models.layers.block import BlockModule, BlockPlace, Places
from tiledseg.models.layers.joins import BinMeans
from tiledseg.models.layers.resampling import Resampled, dim_taps

if TYPE_CHECKING:
    from tiledseg.memory.saved import Hooks

Tensors = dict[int, torch.Tensor]  # by number in the graph
NOWHERE: Places = {}
Compute = Callable[[int, list[torch.Tensor]], torch.Tensor]  # a node's number and inputs -> its output


def run_nodes(graph: Graph, compute: Compute, tensors: Tensors, first: int, stop: int) -> None:
    """Run nodes `first` to `stop` (half-open), each by `compute`; `GraphNetwork.by_policy` gives one for a memory
    policy.

    `tensors` holds the outputs of earlier nodes. New outputs are added, and removed after their last use.
    """
    for k in range(first, stop):
        tensors[k + 1] = compute(k, [tensors[source] for source in graph.sources[k]])
        for tensor in graph.released[k]:
            del tensors[tensor]


class GraphNetwork(nn.Module):
    """The modules of a graph, one a node, each taking the node's inputs in order.

    Modules are named by their nodes, so a checkpoint does not depend on how the network is later cut or wrapped. If
    they are parts of a user's module `whole`, its names of weights, buffers and submodules stay. `untrained`: the
    reason why the graph differs from that module in training; it then stays in evaluation. `form`: the module's return
    value with an `OutputPlace` for each tensor; None for the output, or a tuple of several.
    """

    layers: Mapping[str, nn.Module]

    def __init__(
        self,
        graph: Graph,
        bands: int,
        modules: Sequence[nn.Module],
        whole: nn.Module | None = None,
        untrained: str | None = None,
        form: Any = None,
    ) -> None:
        super().__init__()
        self.graph = graph
        self.bands = bands
        self.untrained = untrained
        self.own_gradients: str | None = None  # the reason why the graph's gradients differ from the module's
        self.only_size: tuple[int, int] | None = None  # the size, plus any strides, at which the module is its graph
        self.origin: Any = None  # a traced network's `tracing.state.Origin`
        self.form = form
        self._offload: Hooks | None = None
        self.recorded: Any = None  # a traced network's `tracing.runs.Recorded`
        if whole is None:
            names = (node.name.replace(".", "-") for node in graph.nodes)
            self._modules["layers"] = nn.ModuleDict(dict(zip(names, modules, strict=True)))
            return
        self.__dict__["layers"] = dict(zip(graph.names[1:], modules, strict=True))
        known = set(whole.modules())
        self._parameters, self._buffers = whole._parameters, whole._buffers
        self._non_persistent_buffers_set = whole._non_persistent_buffers_set
        self._modules.update(whole._modules)
        nodes = _Unnamed(module for module in modules if module not in known)
        for module in (self, nodes, *nodes):
            module.training = whole.training
        self._modules["(nodes)"] = nodes

        def forget_unnamed(network: nn.Module, keys: Any) -> None:
            keys.missing_keys[:] = [key for key in keys.missing_keys if not key.startswith("(nodes).")]

        self.register_load_state_dict_post_hook(forget_unnamed)

    def train(self, mode: bool = True) -> GraphNetwork:
        """Set the mode; norms with constant statistics stay in evaluation. Raises ConfigError for a network that can
        only map."""
        if mode and self.untrained:
            raise ConfigError(
                f"the network was traced in evaluation, and trains otherwise: {self.untrained}; map with it"
            )
        super().train(mode)
        if self.origin:
            self.origin.train(mode)
        for module, layer in zip(self.layers.values(), self.graph.layers, strict=True):
            if layer.is_still:
                module.eval()
        return self

    def hold_statistics(self) -> GraphNetwork:
        """Make running statistics constant from now on, also in training; return the network."""
        self.graph = self.graph.with_still_statistics()
        return self.train(self.training)

    def follow(self, policy: MemoryPolicy, offload: Hooks | None = None) -> GraphNetwork:
        """Follow a memory policy from now on, in all modes and stages; return the network. Results keep their bits.
        `offload`: the hooks for tensors that the policy offloads."""
        assert offload or OFFLOAD not in policy.tensors, "a policy that offloads tensors needs hooks"
        self.graph, self._offload = replace(self.graph, memory=policy), offload
        return self

    @property
    def memory(self) -> MemoryPolicy:
        """The policy of tensors kept for the backward pass."""
        return self.graph.memory or keep_all(self.graph)

    def by_policy(self, graph: Graph, compute: Compute, policy: MemoryPolicy | None = None) -> Compute:
        """Return `compute` under the network's memory policy, or under `policy`."""
        policy = policy or self.memory
        if policy.keeps_all or not torch.is_grad_enabled():
            return compute
        from tiledseg.models.rebuild import Rebuilding

        return Rebuilding(graph, policy, compute, list(self.layers.values()), self._offload)

    def parameters_by_node(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters in order, with names as encoder0.conv0.weight; those of a user's module with its
        names."""
        nodes = {f"layers.{node.name.replace('.', '-')}": node.name for node in self.graph.nodes}
        for name, parameter in self.named_parameters():
            parts = name.split(".", 2)
            node = nodes.get(".".join(parts[:2]))
            yield (name if node is None else f"{node}.{parts[-1]}"), parameter

    def forward(self, x_BCHW: torch.Tensor, places: Places = NOWHERE) -> Any:
        """Return the outputs, each of shape (B, channels, height, width), as `returned` does. `places`: see
        `run_nodes`.

        Raises ConfigError if a traced module has changed, or computes something else at this size."""
        self.check_origin()
        (height, width), stride = x_BCHW.shape[2:], total_stride(self.graph)
        if self.only_size and ((height - self.only_size[0]) % stride or (width - self.only_size[1]) % stride):
            raise ConfigError(
                f"the module does otherwise than its graph for {height} x {width} pixels (it pads, crops or resizes); "
                f"give {self.only_size[0]} x {self.only_size[1]}, or any multiple of {stride} pixels more or less"
            )
        if self.recorded is not None and not torch.compiler.is_compiling():
            self.recorded.check(self, [(len(x_BCHW), (height, width))])
        tensors = {0: x_BCHW}
        self.run_nodes(tensors, 0, len(self.graph), places)
        return self.returned(tuple(tensors[tensor] for tensor in self.graph.results))

    def check_origin(self) -> None:
        if self.origin:
            self.origin.check()

    def returned(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """Return the graph's outputs in the module's own form (list, dict), else the output or a tuple of several.

        A backward pass through them raises ConfigError if the module's gradients differ from the graph's."""
        if self.own_gradients and torch.is_grad_enabled():
            outputs = tuple(_NoGradients.apply(output, self.own_gradients) for output in outputs)
        if self.form is not None:
            return filled(self.form, outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def run_nodes(self, tensors: Tensors, first: int, stop: int, places: Places = NOWHERE) -> None:
        """Run nodes as the function `run_nodes`, each by its module. `places`: a tile's, from `tile_places`; a node
        without a place takes its input for the whole image."""
        modules: list[Any] = list(self.layers.values())

        def compute(k: int, inputs: list[torch.Tensor]) -> torch.Tensor:
            return modules[k].on_tile(places[k], *inputs) if k in places else modules[k](*inputs)

        if not self.memory.keeps_all:
            run_nodes(self.graph, self.by_policy(self.graph, compute), tensors, first, stop)
            return
        for k in range(first, stop):  # few frames from here to the kernel (tests/test_train.py counts them)
            inputs = [tensors[source] for source in self.graph.sources[k]]
            tensors[k + 1] = modules[k].on_tile(places[k], *inputs) if k in places else modules[k](*inputs)
            del inputs
            for tensor in self.graph.released[k]:
                del tensors[tensor]


class _NoGradients(torch.autograd.Function):
    """The identity, whose backward pass raises ConfigError with the reason."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, reason: str) -> torch.Tensor:
        ctx.reason = reason
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ConfigError(f"the graph has no gradients, for its module has its own: {ctx.reason}; map with it")


@dataclass(frozen=True)
class OutputPlace:
    """The place of one of a graph's outputs in a module's return value."""

    index: int


def filled(form: Any, outputs: Sequence[torch.Tensor]) -> Any:
    """Return `form` (lists, tuples, dicts) with the outputs in their places."""
    return tree_map(lambda leaf: outputs[leaf.index] if isinstance(leaf, OutputPlace) else leaf, form)


class _Unnamed(nn.ModuleList):
    """Modules whose weights have other names in the network: `state_dict` leaves them out."""

    def state_dict(self, *args: Any, destination: Any = None, **keywords: Any) -> Any:
        return {} if destination is None else destination


class PooledBranchModule(BlockModule):
    """A branch of a pyramid (`geometry.shapes.PooledBranch`); `modules` are the inner nodes'.

    Each rank sums its own pixels of each bin. One sum over the ranks gives all of them the means, on which each
    computes the inner layers. Then each interpolates its own block of the output, by places in the image. Gradients of
    the layers' weights are a rank's share, as of any layer; those of the means are summed over the ranks.
    """

    def __init__(self, rows: PooledBranch, cols: PooledBranch, modules: Sequence[nn.Module]) -> None:
        super().__init__(rows, cols)
        self.inner = nn.ModuleList(modules)

    def on_block(self, place: BlockPlace, ranks: Any, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        (x_BCHW,) = inputs_BCHW
        dims, among = ((place.row, self.rows), (place.col, self.cols)), None if place.is_whole else ranks
        shares = []  # weight of each owned position in each bin's mean: (bins, positions), float64
        for dim, layer in dims:
            size, weights = dim.sizes[0], torch.zeros(layer.bins, dim.owned.size, dtype=torch.float64)
            for index in range(layer.bins):
                part = Interval(index * size // layer.bins, -(-(index + 1) * size // layer.bins))
                weights[index, part.clip(dim.owned).relative_to(dim.owned.start).slice] = 1 / part.size
            shares.append(weights)
        means_BCHW: torch.Tensor = BinMeans.apply(place.own_part(x_BCHW), *shares, among, None, x_BCHW.shape)
        tensors, graph = {0: means_BCHW}, self.rows.inner
        run_nodes(graph, lambda k, inputs: self.inner[k](*inputs), tensors, 0, len(graph))
        made_BCHW = tensors[graph.results[0]]
        taps = [
            dim_taps(Interval(0, size), dim.given, (size, dim.sizes[1]), "aligned" if self.rows.aligned else "bilinear")
            for (dim, _), size in zip(dims, made_BCHW.shape[2:], strict=True)
        ]
        layout = torch.channels_last if x_BCHW.is_contiguous(memory_format=torch.channels_last) else None
        made_BCHW = made_BCHW.contiguous(memory_format=layout or torch.contiguous_format)
        return Resampled.apply(made_BCHW, *taps)


def with_channels_last(module: nn.Module) -> Any:
    """Make the 4-dim weights channels last, in place. (`Module.to` refuses modules with 5-dim weights, of times.)"""
    return module._apply(lambda t: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t)


def build_network(graph: Graph, bands: int, seed: int | None = None) -> GraphNetwork:
    """Build the modules of a graph for an input of `bands` channels. `seed`: draw all weights from it (He's for leaky
    ReLU), alike on every rank."""
    channels = tensor_channels(graph, bands)
    modules = []
    for node, sources, writes in zip(graph.nodes, graph.sources, graph.overwrites, strict=True):
        counts = tuple(channels[source] for source in sources)
        site = ModuleSite(node.name, node.layer, node.cols or node.layer, counts, writes)
        modules.append(BUILDERS[type(node.layer)](site))
    network = GraphNetwork(graph, bands, modules)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for module in network.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.kaiming_normal_(module.weight, a=0.01, nonlinearity="leaky_relu", generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
    return network


def build_modules(network: Network, seed: int | None = None) -> GraphNetwork:
    """Build the modules of a network's graph: see `build_network`."""
    return build_network(network.graph(), network.bands, seed)
