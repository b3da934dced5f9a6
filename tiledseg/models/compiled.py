"""A network's training pass compiled as a whole: torch.compile fuses the layers between convolutions.

Bias, activation, norm, pooling and concatenation become a few kernels that read and write each tensor once. These
kernels sum in another order than the plain layers: results are equal up to the rounding of the network's precision. The
same tile gives the same numbers on any rank. Each shape of tile is compiled once.

Dropout is drawn outside the compiled function, by generators and hashes, and passed in as tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tiledseg.errors import ConfigError, first_line
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.models.dropout import ChannelDropout
from tiledseg.models.network import GraphNetwork, Tensors, run_nodes

SHAPES = 64  # most shapes of tiles and batches that are compiled; others run uncompiled
INDUCTOR = "inductor"


class CompiledNetwork:
    """A compiled `GraphNetwork.run_nodes` for all nodes of `network`, none of which depends on its place."""

    def __init__(self, network: GraphNetwork, backend: str | None = None) -> None:
        from torch import _dynamo, _inductor

        _dynamo.config.recompile_limit = max(SHAPES, _dynamo.config.recompile_limit)
        if torch.are_deterministic_algorithms_enabled():
            _inductor.config.deterministic = True  # else kernels are chosen by their times
        self._network = network
        channels = tensor_channels(network.graph, network.bands)
        self._dropouts = {
            k: (module, channels[network.graph.sources[k][0]])
            for k, module in enumerate(network.layers.values())
            if isinstance(module, ChannelDropout)
        }
        self._compiled: Any = torch.compile(_whole(network), dynamic=False, backend=backend or INDUCTOR)

    def run_nodes(self, tensors: Tensors) -> None:
        """Run all nodes on the input, tensor 0, and replace it by the outputs."""
        x_BCHW = tensors.pop(0)
        kept = {
            k: module.kept(channels, x_BCHW.device)
            for k, (module, channels) in self._dropouts.items()
            if module.training and module.probability > 0
        }
        tensors.update(zip(self._network.graph.results, self._compiled(x_BCHW, kept), strict=True))


def _whole(network: GraphNetwork) -> Callable[[torch.Tensor, dict[int, torch.Tensor]], list[torch.Tensor]]:
    """Return a function of the input, and of the kept channels of dropouts by node."""
    graph, modules = network.graph, list[Any](network.layers.values())

    def run(x_BCHW: torch.Tensor, kept: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        def compute(k: int, inputs: list[torch.Tensor]) -> torch.Tensor:
            return modules[k].dropped(inputs[0], kept[k]) if k in kept else modules[k](*inputs)

        tensors = {0: x_BCHW}
        run_nodes(graph, compute, tensors, 0, len(graph))
        return [tensors[result] for result in graph.results]

    return run


def check_compiler(device: torch.device) -> None:
    """Raise ConfigError if torch.compile cannot make kernels for the device. On a GPU it compiles a small one."""
    if device.type != "cpu":
        try:
            torch.compile(torch.sin)(torch.zeros(8, device=device))
        except Exception as error:  # of triton, of the C compiler that triton calls, of the driver
            raise ConfigError(
                f"train.compile is on, but no kernel can be made for {device} ({first_line(error)}); install triton "
                "and a C compiler such as gcc, or give off"
            ) from error
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError("train.compile is on, but there is no C++ compiler; install g++, or give off") from error
