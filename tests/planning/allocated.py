"""A training step as PyTorch allocates it, each storage followed from birth to death, and as it is planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from tiledseg.geometry.graph import Graph
from tiledseg.memory.allocations import AllocationMeter
from tiledseg.models.network import GraphNetwork
from tiledseg.planning.walk.step_memory import training_memory

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def usual_loss(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, labels, reduction="sum")


def measured(
    network: GraphNetwork, context: tuple[int, int], autocast: bool = False, loss_of: Loss = usual_loss
) -> tuple[int, int]:
    """Bytes that are kept when the forward pass has ended, and most bytes of a step, without weights and gradients."""
    network = network.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]  # as runs have it
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    known = [t for p in network.parameters() for t in (p, p.grad) if t is not None] + list(network.buffers())
    dtype = torch.get_default_dtype() if autocast else next(network.parameters()).dtype
    source = torch.randn(1, network.bands, *context, dtype=dtype).contiguous(memory_format=torch.channels_last)
    with AllocationMeter(known) as meter:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = network(source.clone())
        size = logits[0].shape if isinstance(logits, tuple) else logits.shape
        labels = torch.zeros(1, *size[2:], dtype=torch.long)
        loss = loss_of(logits, labels)
        del logits, labels  # as in the trainer's steps, the loss alone holds them
        kept = meter.bytes - loss.nbytes
        loss.backward()
    return kept, meter.peak


def planned(graph: Graph, bands: int, context: tuple[int, int], width: int = 4) -> tuple[int, int]:
    memory = training_memory(graph, bands, context, width)
    return memory.activations, memory.activations + memory.backward
