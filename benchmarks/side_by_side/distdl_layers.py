"""DistDL's layers in the places of torch's, over MPI. Its convolutions, pooling and resizing know of blocks; each layer
of single pixels stays; a transposed convolution whose kernel is its stride takes its weights by DistDL's Broadcast."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional

from benchmarks.side_by_side.spatial import BATCH, Block, Meter, Step, backward, grads_of, mesh_of

np.int = int  # type: ignore[attr-defined]  # an alias of old, which DistDL uses
MIXING = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.MultiheadAttention)  # of torch's activations


def counted(comm: Any) -> Any:
    """Return a communicator whose calls of DistDL are counted (`Meter`)."""

    def wrapped(name: str) -> Any:
        def call(self: Any, given: Any, *more: Any, **options: Any) -> Any:
            hands = name not in ("Ibcast", "Bcast") or self.rank == options["root"]
            if options.get("dest") != MPI.PROC_NULL:
                Meter.count(name == "Isend", given if hands and isinstance(given, np.ndarray) else ())
            return getattr(super(kind, self), name)(given, *more, **options)

        return call

    names = ("Isend", "Ibcast", "Bcast", "Ireduce", "Iallreduce", "Allreduce", "Allgather")
    kind: Any = type("Counted", (type(comm),), {name: wrapped(name) for name in names})
    return comm if comm == MPI.COMM_NULL else kind(comm)


class Spread(nn.Module):
    """A transposed convolution with kernel = stride; rank 0 holds its weights, as those of DistDL's layers."""

    def __init__(self, partition: Any, layer: nn.ConvTranspose2d) -> None:
        super().__init__()
        if layer.kernel_size != layer.stride:
            raise NotImplementedError("DistDL has no transposed convolution with a halo")
        self.stride = layer.stride
        root = partition.create_partition_inclusive([0]).create_cartesian_topology_partition([1])
        for name, tensor in layer.named_parameters():
            held = nn.Parameter(tensor.detach()) if root.active else torch.empty(0, requires_grad=True)
            setattr(self, name, held)
        broadcast = import_module("distdl.nn").Broadcast
        self.sent = nn.ModuleList(broadcast(root, partition, preserve_batch=False) for _ in range(2))

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        weight, bias = (each(held) for each, held in zip(self.sent, (self.weight, self.bias), strict=True))
        return functional.conv_transpose2d(x_BCHW, weight, bias, stride=self.stride)


def twin(partition: Any, layer: nn.Module) -> nn.Module | None:
    """Return DistDL's layer for one of torch's; None for a module whose parts are to be replaced."""
    theirs = import_module("distdl.nn")
    match layer:
        case nn.Conv2d(groups=1, padding_mode="zeros"):
            names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation")
            given = {name: getattr(layer, name) for name in names}
            made = theirs.DistributedConv2d(partition, bias=layer.bias is not None, **given)
            for name, tensor in layer.named_parameters():
                if isinstance(getattr(made, name), nn.Parameter):  # rank 0 holds them
                    getattr(made, name).data.copy_(tensor.data)
            return made
        case nn.ConvTranspose2d():
            return Spread(partition, layer)
        case nn.MaxPool2d() | nn.AvgPool2d():
            kind = "Max" if isinstance(layer, nn.MaxPool2d) else "Avg"
            pool = getattr(theirs, f"Distributed{kind}Pool2d")
            return pool(partition, kernel_size=layer.kernel_size, stride=layer.stride, padding=layer.padding)
        case nn.BatchNorm2d():
            made = theirs.DistributedBatchNorm(partition, num_features=layer.num_features, eps=layer.eps)
            for name, tensor in (("gamma", layer.weight), ("beta", layer.bias)):
                if isinstance(getattr(made, name), nn.Parameter) and getattr(made, name).numel():
                    getattr(made, name).data.copy_(tensor.data.reshape(getattr(made, name).shape))
            return made
        case nn.Upsample():
            given = {"scale_factor": layer.scale_factor, "align_corners": bool(layer.align_corners)}
            return theirs.DistributedUpsample(partition, mode=layer.mode.removeprefix("bi"), **given)
        case nn.ModuleList() | nn.Sequential() | nn.Identity() | nn.modules.dropout._DropoutNd():
            return None
        case _ if type(layer).__module__ == nn.ReLU.__module__ and not isinstance(layer, MIXING):
            return layer  # of single pixels
        case _ if not list(layer.children()):
            kind = " of this kind" if isinstance(layer, nn.Conv2d) else ""
            raise NotImplementedError(f"DistDL has no {type(layer).__name__}{kind}")
    return None


def replace(partition: Any, module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    """Replace layers by DistDL's, in depth, each once: some networks hold a layer in two places. Raises
    NotImplementedError where it has none."""
    if id(module) in known:
        return known[id(module)]
    made = twin(partition, module)
    if made is None:
        made = module
        for name, child in [*module._modules.items()]:  # named_children leaves out a second name
            setattr(module, name, child and replace(partition, child, known))
    elif made is not module:  # its exchange writes into its input, which autograd may have saved
        made.register_forward_pre_hook(lambda _, given: (given[0].clone(),))
    known[id(module)] = known[id(made)] = made
    return made


def step_of(module: nn.Module, ranks: int, shape: torch.Size) -> Step:
    """Return a step of the network by DistDL's layers, on even blocks."""
    torch.set_default_dtype(next(module.parameters()).dtype)  # its empty weights are of the default type
    world, mesh = MPI.COMM_WORLD, mesh_of(ranks)
    partitions = import_module("distdl.backends.mpi.partition").MPIPartition
    partitions._comm = property(lambda self: self.held, lambda self, comm: setattr(self, "held", counted(comm)))
    partition = partitions(world)
    network = replace(partition.create_cartesian_topology_partition([1, 1, *mesh]), module, {})
    place = divmod(world.rank, mesh[1])

    def at(size: torch.Size) -> tuple[slice, ...]:
        each = [length // parts for length, parts in zip(size[2:], mesh, strict=True)]
        return (*BATCH, *(slice(n * k, n * (k + 1)) for n, k in zip(each, place, strict=True)))

    def step(x_BCHW: torch.Tensor) -> Block:
        network.zero_grad()
        part_BCHW = x_BCHW[at(x_BCHW.shape)].clone().requires_grad_()
        y_BCHW = network(part_BCHW)
        backward(y_BCHW, shape, at(shape))
        gradients = {key.replace("gamma", "weight").replace("beta", "bias"): g for key, g in grads_of(network).items()}
        return Block(y_BCHW.detach(), at(shape), part_BCHW.grad, at(x_BCHW.shape), gradients)

    return step
