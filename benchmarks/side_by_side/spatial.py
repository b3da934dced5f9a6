"""One image over several ranks by each peer, beside the whole image: PEER capability|cost RANKS ITEM ...

Prints a line of JSON an item. Ranks are forks of this process, over Gloo, with `LIMIT` seconds an item; as DistDL it is
one of the ranks of mpirun."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

import tiledseg
from benchmarks.foreign_networks.networks import NETWORKS
from benchmarks.forks import import_all, run_ranks
from benchmarks.side_by_side.layers import BANDS, SIZE, build
from benchmarks.stand_ins import stand_ins
from tiledseg.errors import ConfigError
from tiledseg.foreign.spread import trace as traced
from tiledseg.memory.allocations import AllocationMeter
from tiledseg.tracing.trace import trace

LIMIT, PAIRS, COST_SIZE = 200.0, 12, (384, 384)
OURS = "tiledseg"


@dataclass(frozen=True)
class Block:
    """A rank's results: y and dx with their places in the whole, and the summed gradients by name where it has them."""

    y_BCHW: torch.Tensor
    y_at: tuple[slice, ...]
    dx_BCHW: Any
    dx_at: tuple[slice, ...]
    gradients: dict[str, torch.Tensor]


Step = Callable[[torch.Tensor], Block]
BATCH = (slice(None), slice(None))


@cache
def weights(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.cos(torch.arange(shape.numel(), dtype=torch.float64)).reshape(shape).to(dtype)


def backward(y_BCHW: torch.Tensor, shape: torch.Size, at: tuple[slice, ...] = BATCH) -> None:
    """Differentiate the loss, a weighted sum of the output, of which this is the block at this place."""
    given = weights(shape, y_BCHW.dtype)[at]
    if y_BCHW.shape != given.shape:
        raise ValueError(f"a block of the output is {tuple(y_BCHW.shape)}, of a whole of {tuple(shape)}")
    (y_BCHW * given).sum().backward()


def grads_of(module: nn.Module) -> dict[str, Any]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def mesh_of(ranks: int) -> tuple[int, int]:
    return (ranks, 1) if ranks < 4 else (ranks // 2, 2)


def tiledseg_step(module: nn.Module, ranks: int, shape: torch.Size) -> Step:
    spread = tiledseg.parallelize(module, mesh=mesh_of(ranks))

    def step(x_BCHW: torch.Tensor) -> Block:
        own = (*BATCH, *spread.block(*x_BCHW.shape[2:]).slices)
        given = (*BATCH, *spread.output_block(*x_BCHW.shape[2:]).slices)
        part_BCHW = x_BCHW[own].clone().requires_grad_()
        y_BCHW = spread(part_BCHW)
        backward(y_BCHW, shape, given)
        spread.reduce_gradients()
        return Block(y_BCHW.detach(), given, part_BCHW.grad, own, grads_of(spread))

    return step


def _sharded(wrap: Callable[..., Any], module: nn.Module, mesh: Any, dims: list[int], shape: torch.Size) -> Step:
    """Return the step of a peer whose tensors know of their blocks: `wrap` makes one of a rank's block."""
    at = mesh.get_coordinate()

    def places(size: torch.Size, shards: Any) -> tuple[slice, ...]:
        axes = {each.dim: axis for axis, each in enumerate(shards) if isinstance(each, Shard)}
        each = {dim: size[dim] // mesh.size(axis) for dim, axis in axes.items()}
        cut = {dim: slice(each[dim] * at[axis], each[dim] * (at[axis] + 1)) for dim, axis in axes.items()}
        return tuple(cut.get(dim, slice(None)) for dim in range(len(size)))

    def step(x_BCHW: torch.Tensor) -> Block:
        placements = [Shard(dim) for dim in dims]
        own = places(x_BCHW.shape, placements)
        part_BCHW = x_BCHW[own].clone().requires_grad_()
        y = module(wrap(part_BCHW, mesh, placements, "chunk", x_BCHW.shape))
        if not all(isinstance(each, Shard) for each in y.placements):
            y = y.redistribute(mesh, [Replicate()] * mesh.ndim)
        given, local_BCHW = places(shape, y.placements), y.to_local()
        backward(local_BCHW, shape, given)
        gradients = {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in grads_of(module).items()}
        if part_BCHW.grad is None:
            raise ValueError("no gradient reaches the input")
        return Block(local_BCHW.detach(), given, part_BCHW.grad, own, gradients)

    return step


def dtensor_step(module: nn.Module, ranks: int, shape: torch.Size) -> Step:
    strategies = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
    for operation in (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default):
        strategies.pop(operation, None)
    mesh = init_device_mesh("cpu", (ranks,))
    return _sharded(lambda *of: DTensor.from_local(*of[:3]), distribute_module(module, mesh), mesh, [3], shape)


def shardtensor_step(module: nn.Module, ranks: int, shape: torch.Size) -> Step:
    peer = import_module("physicsnemo.domain_parallel")
    mesh = init_device_mesh("cpu", mesh_of(ranks)[: 1 if ranks < 4 else 2])
    return _sharded(peer.ShardTensor.from_local, module, mesh, [2] if ranks < 4 else [2, 3], shape)


STEPS: dict[str, Callable[[nn.Module, int, torch.Size], Step]] = {
    OURS: tiledseg_step,
    "torch DTensor": dtensor_step,
    "ShardTensor": shardtensor_step,
    "DistDL": lambda *of: import_module("benchmarks.side_by_side.distdl_layers").step_of(*of),
}


class Meter(AllocationMeter):
    """The peak bytes of the tensors that a step makes, and in `ALL` this rank's messages and collective calls by phase,
    with the bytes that it hands over: operations of torch.distributed; `distdl_layers.counted` adds those of mpi4py."""

    ALL: ClassVar = Counter[str]()
    phase: ClassVar = "forward"

    @staticmethod
    def count(message: bool, given: Any) -> None:
        sizes = (getattr(each, "nbytes", 0) for each in torch.utils._pytree.tree_leaves(given))
        Meter.ALL.update({f"{Meter.phase} {'messages' if message else 'calls'}": 1, f"{Meter.phase} bytes": sum(sizes)})

    def __enter__(self) -> Meter:
        Meter.ALL.clear()
        Meter.phase = "forward"
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(each, "placements") for each in types):
            return NotImplemented  # a tensor of blocks: the operations that it is made of come here one by one
        if torch._C._current_autograd_node() is not None:
            Meter.phase = "backward"
        elif Meter.phase == "backward":
            Meter.phase = "gradients"
        space, name = func._schema.name.split("::")
        if space in ("c10d", "_c10d_functional") and not any(word in name for word in ("recv", "wait", "barrier")):
            named = zip((each.name for each in func._schema.arguments), args, strict=False)
            self.count(name == "send", next((value for key, value in named if key.startswith("input")), args[0]))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _meet(self, storage: torch.UntypedStorage) -> None:
        with contextlib.suppress(RuntimeError):  # a tensor of blocks has no storage of its own
            storage.data_ptr()
            super()._meet(storage)


def by_turns(*runs: Callable[[], Any]) -> list[list[tuple[float, float]]]:
    """Return seconds and processor seconds of all ranks of each run in each turn, after a first; every second turn goes
    through the runs from the last to the first."""
    turns = [[(0.0, 0.0)] * len(runs) for _ in range(PAIRS + 1)]
    for number, turn in enumerate(turns):
        for k in range(len(runs))[:: -1 if number % 2 else 1]:
            gathered(None)
            begun, worked = time.perf_counter(), time.process_time()
            runs[k]()
            worked = sum(gathered(time.process_time() - worked))
            turn[k] = time.perf_counter() - begun, worked
    return turns[1:]


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    if distributed.is_initialized():
        found: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(found, value)
        return found
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return [value]  # of one process
    return list(import_module("mpi4py.MPI").COMM_WORLD.allgather(value))


def compared(block: Block, expected: Block) -> dict[str, float]:
    """Return how far y, dx and dW of all ranks are from those of the whole image, over their largest value."""
    y_BCHW, dx_BCHW = (torch.full_like(each, torch.nan) for each in (expected.y_BCHW, expected.dx_BCHW))
    blocks = gathered(block)
    for each in blocks:
        y_BCHW[each.y_at], dx_BCHW[each.dx_at] = each.y_BCHW, each.dx_BCHW
    gradients: dict[str, Any] = next(filter(None, (each.gradients for each in blocks)), {})
    if missing := expected.gradients.keys() - gradients.keys():
        raise ValueError(f"no gradient of {min(missing)}")
    parts = [torch.cat([of[k].flatten() for k in expected.gradients]) for of in (gradients, expected.gradients)]
    pairs = {"y": (y_BCHW, expected.y_BCHW), "dx": (dx_BCHW, expected.dx_BCHW), "dW": parts}
    far = {key: ((found - true).abs().max() / true.abs().max()).item() for key, (found, true) in pairs.items()}
    return {key: float(f"{value:.1e}") if value == value else float("inf") for key, value in far.items()}


def whole(module: nn.Module, x_BCHW: torch.Tensor) -> Block:
    """Return the results of one process on the whole image."""
    x_BCHW = x_BCHW.clone().requires_grad_()
    y_BCHW = module(x_BCHW)
    backward(y_BCHW, y_BCHW.shape)
    return Block(y_BCHW.detach(), BATCH, x_BCHW.grad, BATCH, grads_of(module))


class Item:
    """A layer or network that a peer computes on some ranks, beside the whole image on each."""

    def __init__(self, peer: str, kind: str, ranks: int, name: str) -> None:
        self.peer, self.kind, self.ranks, self.name = peer, kind, ranks, name
        size = COST_SIZE if kind == "cost" else NETWORKS[name].size or SIZE if name in NETWORKS else SIZE
        bands = NETWORKS[name].bands if name in NETWORKS else BANDS
        dtype = torch.float32 if kind == "cost" else torch.float64
        self.module = build(name).to(dtype)
        self.x_BCHW = torch.randn(1, bands, *size, generator=torch.Generator().manual_seed(5), dtype=dtype)
        self.expected = whole(copy.deepcopy(self.module), self.x_BCHW)
        self.module = traced(self.module, bands) if peer == OURS else self.module  # once for all forks

    def step(self, peer: str) -> Step:
        return STEPS[peer](copy.deepcopy(self.module), self.ranks, self.expected.y_BCHW.shape)

    def run(self) -> dict[str, Any]:
        """Compute it as one of the ranks."""
        torch.set_num_threads(1)
        if self.peer != "DistDL":
            distributed.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
        found: dict[str, Any] = compared(self.step(self.peer)(self.x_BCHW), self.expected)
        found |= self._cost() if self.kind == "cost" else {}
        if gathered(None) and self.peer != "DistDL":
            distributed.destroy_process_group()
        return found

    def _cost(self) -> dict[str, Any]:
        """Measure the memory of a first step, the messages of the second, and time steps and ours by turns."""
        step, ours = self.step(self.peer), self.step(OURS)
        with Meter(()) as first:
            step(self.x_BCHW)
        with Meter(()):
            step(self.x_BCHW)
        counts: Counter[str] = sum(gathered(Counter(Meter.ALL)), Counter())
        turns = by_turns(*(partial(each, self.x_BCHW) for each in (step, ours)))
        return {
            **counts,
            "MiB": round(max(gathered(first.peak)) / 2**20, 1),
            "seconds": round(statistics.median(theirs[0] for theirs, _ in turns), 4),
            "ratio": [round(theirs[0] / ours[0], 3) for theirs, ours in turns],
            "cpu": [round(theirs[1] / ours[1], 3) for theirs, ours in turns],
        }


def rank_of() -> int:
    return int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def by_forks(ranks: int, body: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what rank 0 of this process's forks found, or the error of one of them."""

    def printed() -> int:
        found = body()
        if rank_of() == 0:
            print(json.dumps(found), flush=True)
        return 0

    with tempfile.TemporaryDirectory() as folder:
        ends = run_ranks(printed, ranks, Path(folder), LIMIT)
    return found_of([end.code for end in ends], [end.out + end.err for end in ends])[-1]


def found_of(codes: list[int], said: list[str]) -> list[dict[str, Any]]:
    """Return what lines of JSON say, and then the error, or refusal, of ranks that failed, in its own words."""
    found = [json.loads(line) for each in said for line in each.splitlines() if line.startswith('{"')]
    if found and not any(codes):
        return found
    for text in said:
        for line in text.rpartition("Traceback (most recent call last):")[2].splitlines():
            if re.match(r"[A-Za-z_][\w.]*(: |$)", line):
                kind, _, words = line.partition(": ")
                refused = kind.rpartition(".")[2] in ("ConfigError", "GeometryError")
                return [*found, {"refused" if refused else "error": words or kind}]
    last = next((line for line in said[0].splitlines()[::-1] if line.strip("- ")), f"ended with {codes}")
    return [*found, {"error": f"no end within {LIMIT:.0f} s" if -9 in codes else last}]


def main() -> int:
    peer, kind, ranks, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if peer != "DistDL":  # once for all forks, what the first step of each would import
        import_all()
        trace(nn.Conv2d(1, 1, 1), 1)
    if peer == "ShardTensor":
        with stand_ins():
            import_module("physicsnemo.domain_parallel").register_custom_ops()
    for name in names:
        try:
            item = Item(peer, kind, int(ranks), name)
            found = item.run() if peer == "DistDL" else by_forks(int(ranks), item.run)
        except (ImportError, ConfigError, NotImplementedError) as error:  # of every rank, before any message
            word = {ImportError: "absent", ModuleNotFoundError: "absent", ConfigError: "refused"}
            found = {word.get(type(error), "error"): str(error)}
        if rank_of() == 0:
            print(json.dumps({"item": name, **found}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(import_module("benchmarks.side_by_side.spatial").main())  # the module that peers import
