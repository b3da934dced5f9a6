"""Bytes that a training step reads and writes beside its convolutions: node by node, and compiled.

Counted by a program, without a GPU too. Node by node: the step runs on tensors without values (device `meta`), and of
each operation its inputs and outputs are added up; cuDNN adds a convolution's bias in a pass of its own, and sums its
gradient in another. Compiled: torch.compile's scheduler says what each kernel that it writes reads and writes; of a
convolution the sum of its bias's gradient is left. All in bfloat16, of which float32 has twice as many.

A bias that is added apart from its convolution, so that its gradient might be summed in the pass that makes it, is
worse by the scheduler of 2.13 on a CPU: it sums in a pass of its own, which reads two tensors (18.3 GB, not 15.8).

    python -m benchmarks.gpu.element_bytes --out FOLDER --work FOLDER [--small]
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.part import Part, SkippedError, begin_part
from tiledseg.architecture.unet import UNet
from tiledseg.geometry.shapes import tensor_shapes
from tiledseg.models.compiled import CompiledNetwork
from tiledseg.models.network import GraphNetwork, Tensors, build_modules
from tiledseg.training.objective import PixelTerm

CLASSES_IGNORED = 255
LARGE = UNet(5, base_channels=64)
SMALL = UNet(1, 1, base_channels=4)
SIDE = 1440  # pixels of the step whose bytes are told
COMPILED_SIDE = 96  # of the one that is compiled; bytes of all but weights grow with the pixels
HIDDEN_IN_CONVOLUTIONS = {"convolution", "convolution_backward"}
FREE = {"detach", "empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "alias", "lift_fresh"}


def main() -> int:
    part = begin_part(__file__)
    unet = SMALL if part.small else LARGE
    plain = part.measure("node by node", "GB", partial(node_by_node, unet, SIDE))
    part.measure("compiled", "GB", partial(compiled, part, unet, plain), needs=5)
    return int(part.failed)


def node_by_node(unet: UNet, side: int) -> dict[str, float]:
    """GB of a step by kind of operation, and in all."""
    network = build_modules(unet, seed=0).to("meta", torch.bfloat16).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with Bytes() as bytes_of:
        _step(network, side)
    return _in_gb(bytes_of.counts)


def _step(network: GraphNetwork, side: int) -> None:
    """Forward, loss and backward, as `StepLoss` takes it: of logits in float32."""
    like = next(network.parameters())
    x_BCHW = torch.empty(1, network.bands, side, side, device=like.device, dtype=like.dtype)
    logits_BKHW = network(x_BCHW.contiguous(memory_format=torch.channels_last))
    target_BHW = torch.empty(1, side, side, device=like.device, dtype=torch.uint8)
    PixelTerm(CLASSES_IGNORED).sums((logits_BKHW.float(),), target_BHW)[0].backward()


class Bytes(TorchDispatchMode):
    """`counts`: bytes by the name of the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operation(*args, **(kwargs or {}))
        name = operation.overloadpacket.__name__
        if name in HIDDEN_IN_CONVOLUTIONS:
            self._bias(name, args, made)
        elif name not in FREE and not operation.is_view:
            self.counts[name] += _bytes(_distinct(tree_leaves((args, kwargs)))) + _bytes(_tensors(made))
        return made

    def _bias(self, name: str, args: Any, made: Any) -> None:
        """A pass over the output, and over its gradient."""
        if name == "convolution" and args[2] is not None:
            self.counts["bias"] += 2 * _bytes([made])
        elif name == "convolution_backward" and args[3]:
            self.counts["gradient of bias"] += _bytes([args[0]])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _distinct(values: Iterable[Any]) -> list[torch.Tensor]:
    return list({id(value): value for value in _tensors(list(values))}.values())


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _in_gb(counts: Counter[str]) -> dict[str, float]:
    return {"all": sum(counts.values()) / 1e9, **{name: count / 1e9 for name, count in counts.most_common(12)}}


def compiled(part: Part, unet: UNet, plain: dict[str, float] | None) -> dict[str, float]:
    """GB of a compiled step at `SIDE`: kernels by its scheduler, gradients of biases, and the loss, which is not
    compiled, as `node_by_node` counts it."""
    on_gpu = part.device.type == "cuda"
    if part.small and not on_gpu:
        raise SkippedError("the compiler for a CPU takes most of a minute; without --small it is counted")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    side = SIDE if on_gpu else COMPILED_SIDE
    network = build_modules(unet, seed=0).to(part.device, dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x_BCHW = torch.randn(1, unet.bands, side, side, device=part.device, dtype=dtype)
    tensors: Tensors = {0: x_BCHW.contiguous(memory_format=torch.channels_last)}
    with scheduled() as kernels:
        CompiledNetwork(network.train()).run_nodes(tensors)
        (logits_BKHW,) = tensors.values()
        logits_BKHW.sum().backward()
    scale = (SIDE / side) ** 2 * 2 / dtype.itemsize / 1e9
    found = {"kernels": sum(kernels) * scale, "gradient of bias": _biases(network, SIDE) / 1e9}
    found["loss"] = _loss(unet, SIDE) / 1e9
    return {
        "all": sum(found.values()),
        **found,
        "graphs": float(len(kernels)),
        "before": plain["all"] if plain else 0.0,
    }


@contextmanager
def scheduled() -> Iterator[list[int]]:
    """Bytes that the kernels of each graph read and write, weights of convolutions and these themselves left out, of
    what is compiled meanwhile."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    found: list[int] = []
    generate, caches = GraphLowering.codegen, config.force_disable_caches

    def counting(graph: Any) -> Any:
        code = generate(graph)
        found.append(sum(n.get_read_write_buffers_sizes() for n in graph.scheduler.nodes if not n.is_extern()))
        return code

    lowering: Any = GraphLowering
    lowering.codegen, config.force_disable_caches = counting, True
    try:
        yield found
    finally:
        lowering.codegen, config.force_disable_caches = generate, caches


def _biases(network: GraphNetwork, side: int) -> int:
    """Of the outputs of all convolutions with a bias, in bfloat16."""
    shapes = tensor_shapes(network.graph, network.bands, side, side)
    biased = [k for k, module in enumerate(network.layers.values()) if getattr(module, "bias", None) is not None]
    return sum(2 * math.prod(shapes[k + 1]) for k in biased)


def _loss(unet: UNet, side: int) -> int:
    logits_BKHW = torch.empty(1, unet.classes, side, side, device="meta", dtype=torch.bfloat16)
    logits_BKHW = logits_BKHW.contiguous(memory_format=torch.channels_last).requires_grad_()
    target_BHW = torch.empty(1, side, side, device="meta", dtype=torch.uint8)
    with Bytes() as bytes_of:
        PixelTerm(CLASSES_IGNORED).sums((logits_BKHW.float(),), target_BHW)[0].backward()
    return sum(bytes_of.counts.values())


if __name__ == "__main__":
    sys.exit(main())
