"""One image over several ranks by each peer, beside the whole image: PEER capability|cost RANKS ITEM ...

Prints a line of JSON an item. Ranks are forks of this process, over Gloo, with `LIMIT` seconds an item; DistDL's are
processes under mpirun, which take item after item."""

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
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import distributed, nn

from benchmarks.foreign_networks.networks import NETWORKS
from benchmarks.launching import mpirun, run_process
from benchmarks.many_ranks.ranks import import_all, run_ranks
from benchmarks.side_by_side.layers import BANDS, SIZE, build
from benchmarks.stand_ins import stand_ins
from tiledseg.errors import ConfigError
from tiledseg.foreign.spread import traced
from tiledseg.memory.allocations import AllocationMeter
from tiledseg.tracing.trace import trace

LIMIT, PAIRS, COST_SIZE = 200.0, 4, (384, 384)
OURS = "tiledseg"


@dataclass(frozen=True)
class Block:
    """A rank's results: y and dx with their places in the whole, and the summed gradients by name where it has them."""

    y_BCHW: torch.Tensor
    y_at: tuple[slice, ...]
    dx_BCHW: torch.Tensor
    dx_at: tuple[slice, ...]
    gradients: dict[str, torch.Tensor]


Step = Callable[[torch.Tensor], Block]
BATCH = (slice(None), slice(None))


def weights(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights of the loss, which is the sum of the output times these."""
    return torch.cos(torch.arange(shape.numel(), dtype=torch.float64)).reshape(shape).to(dtype)


def mesh_of(ranks: int) -> tuple[int, int]:
    return (ranks, 1) if ranks < 4 else (ranks // 2, 2)


def tiledseg_step(module: nn.Module, ranks: int, shape: torch.Size) -> Step:
    import tiledseg

    spread = tiledseg.parallelize(module, mesh=mesh_of(ranks))

    def step(x_BCHW: torch.Tensor) -> Block:
        own = (*BATCH, *spread.block(*x_BCHW.shape[2:]).slices)
        given = (*BATCH, *spread.output_block(*x_BCHW.shape[2:]).slices)
        part_BCHW = x_BCHW[own].clone().requires_grad_()
        y_BCHW = spread(part_BCHW)
        (y_BCHW * weights(shape, x_BCHW.dtype)[given]).sum().backward()
        spread.reduce_gradients()
        gradients = {name: p.grad.clone() for name, p in spread.named_parameters() if p.grad is not None}  # of buckets
        assert part_BCHW.grad is not None
        return Block(y_BCHW.detach(), given, part_BCHW.grad, own, gradients)

    return step


def _sharded(wrap: Callable[..., Any], module: nn.Module, mesh: Any, dims: list[int], shape: torch.Size) -> Step:
    """Return the step of a peer whose tensors know of their blocks: `wrap` makes one of a rank's block."""
    from torch.distributed.tensor import Replicate, Shard

    at = mesh.get_coordinate()

    def places(size: torch.Size, placements: Any) -> tuple[slice, ...]:
        cut = [slice(None)] * len(size)
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                each = size[placement.dim] // mesh.size(axis)
                cut[placement.dim] = slice(each * at[axis], each * (at[axis] + 1))
        return tuple(cut)

    def step(x_BCHW: torch.Tensor) -> Block:
        placements = [Shard(dim) for dim in dims]
        own = places(x_BCHW.shape, placements)
        part_BCHW = x_BCHW[own].clone().requires_grad_()
        y = module(wrap(part_BCHW, mesh, placements, "chunk", x_BCHW.shape))
        if not all(isinstance(each, Shard) for each in y.placements):
            y = y.redistribute(mesh, [Replicate()] * mesh.ndim)
        given, local_BCHW = places(shape, y.placements), y.to_local()
        if local_BCHW.shape != weights(shape, x_BCHW.dtype)[given].shape:
            raise ValueError(f"a block of the output is {tuple(local_BCHW.shape)}, of a whole of {tuple(shape)}")
        (local_BCHW * weights(shape, x_BCHW.dtype)[given]).sum().backward()
        whole = [(name, p.grad) for name, p in module.named_parameters() if p.grad is not None]
        gradients = {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in whole}
        if part_BCHW.grad is None:
            raise ValueError("no gradient reaches the input")
        return Block(local_BCHW.detach(), given, part_BCHW.grad, own, gradients)

    return step


def dtensor_step(module: nn.Module, ranks: int, shape: torch.Size) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, distribute_module

    mesh = init_device_mesh("cpu", (ranks,))
    return _sharded(lambda *of: DTensor.from_local(*of[:3]), distribute_module(module, mesh), mesh, [3], shape)


def older_dtensor_step(module: nn.Module, ranks: int, shape: torch.Size) -> Step:
    from torch.distributed.tensor import DTensor

    strategies = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
    for operation in (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default):
        strategies.pop(operation, None)
    return dtensor_step(module, ranks, shape)


def shardtensor_step(module: nn.Module, ranks: int, shape: torch.Size) -> Step:
    from torch.distributed.device_mesh import init_device_mesh

    peer = import_module("physicsnemo.domain_parallel")
    mesh = init_device_mesh("cpu", mesh_of(ranks)[: 1 if ranks < 4 else 2])
    return _sharded(peer.ShardTensor.from_local, module, mesh, [2] if ranks < 4 else [2, 3], shape)


def distdl_step(module: nn.Module, ranks: int, shape: torch.Size) -> Step:
    return import_module("benchmarks.side_by_side.distdl_layers").step_of(module, mesh_of(ranks), shape)


STEPS = {
    OURS: tiledseg_step,
    "torch DTensor": dtensor_step,
    "torch DTensor, older rule": older_dtensor_step,
    "ShardTensor": shardtensor_step,
    "DistDL": distdl_step,
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


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    if not distributed.is_initialized():
        from mpi4py import MPI

        return MPI.COMM_WORLD.allgather(value)
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def compared(block: Block, expected: Block) -> dict[str, float]:
    """Return how far y, dx and dW of all ranks are from those of the whole image, over their largest value."""
    y_BCHW, dx_BCHW = torch.full_like(expected.y_BCHW, torch.nan), torch.full_like(expected.dx_BCHW, torch.nan)
    gradients: dict[str, torch.Tensor] = {}
    for each in gathered(block):
        y_BCHW[each.y_at], dx_BCHW[each.dx_at] = each.y_BCHW, each.dx_BCHW
        gradients = gradients or each.gradients
    if missing := expected.gradients.keys() - gradients.keys():
        raise ValueError(f"no gradient of {min(missing)}")
    parts = [torch.cat([of[k].flatten() for k in expected.gradients]) for of in (gradients, expected.gradients)]
    pairs = {"y": (y_BCHW, expected.y_BCHW), "dx": (dx_BCHW, expected.dx_BCHW), "dW": parts}
    far = {key: ((found - true).abs().max() / true.abs().max()).item() for key, (found, true) in pairs.items()}
    return {key: value if value == value else float("inf") for key, value in far.items()}


def whole(module: nn.Module, x_BCHW: torch.Tensor) -> Block:
    """Return the results of one process on the whole image."""
    x_BCHW = x_BCHW.clone().requires_grad_()
    y_BCHW = module(x_BCHW)
    (y_BCHW * weights(y_BCHW.shape, x_BCHW.dtype)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    assert x_BCHW.grad is not None
    return Block(y_BCHW.detach(), BATCH, x_BCHW.grad, BATCH, gradients)


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

    def run(self) -> int:
        """Compute it as one of the ranks, and print rank 0's line."""
        torch.set_num_threads(1)
        if self.peer != "DistDL":
            distributed.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
        found: dict[str, Any] = compared(self.step(self.peer)(self.x_BCHW), self.expected)
        found |= self._cost() if self.kind == "cost" else {}
        if gathered(None) and rank_of() == 0:
            print("=" + json.dumps(found), flush=True)
        if self.peer != "DistDL":
            distributed.destroy_process_group()
        return 0

    def _cost(self) -> dict[str, Any]:
        """Measure the memory of a first step, the messages of the second, and time steps and ours by turns."""
        step, ours = self.step(self.peer), self.step(OURS)
        with Meter(()) as first:
            step(self.x_BCHW)
        with Meter(()):
            step(self.x_BCHW)
        counts: Counter[str] = sum(gathered(Counter(Meter.ALL)), Counter())
        taken: list[list[tuple[float, float]]] = [[], []]
        for _ in range(PAIRS + 1):
            for of, each in zip(taken, (step, ours), strict=True):
                gathered(None)
                begun, worked = time.perf_counter(), time.process_time()
                each(self.x_BCHW)
                worked = sum(gathered(time.process_time() - worked))
                of.append((time.perf_counter() - begun, worked))
        turns = list(zip(*taken, strict=True))[1:]
        return {
            **counts,
            "MiB": round(max(gathered(first.peak)) / 2**20, 1),
            "seconds": round(statistics.median(theirs[0] for theirs, _ in turns), 4),
            "ratio": [round(theirs[0] / ours[0], 3) for theirs, ours in turns],
            "cpu": [round(theirs[1] / ours[1], 3) for theirs, ours in turns],
        }


def rank_of() -> int:
    return int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def outcomes(peer: str, kind: str, ranks: int, names: list[str]) -> list[dict[str, Any]]:
    """Return what an item's ranks found, or the words of their error: of one name, or more under mpirun."""
    if peer == "DistDL":
        some = names[:1] if kind == "cost" else names
        command = mpirun(ranks, "benchmarks.side_by_side.spatial", peer, kind, str(ranks), *some, "--rank")
        done = run_process(command, 60 + LIMIT * len(some))
        found = found_of([done.code], [f"{done.out}\n{done.err}"])
        return [{"item": name, **each} for name, each in zip(some, found, strict=False)]
    try:
        item = Item(peer, kind, ranks, names[0])
    except (ImportError, ConfigError) as error:
        return [{"item": names[0], "absent" if isinstance(error, ImportError) else "refused": str(error)}]
    return [{"item": names[0], **by_forks(ranks, item.run)}]


def by_forks(ranks: int, body: Callable[[], int]) -> dict[str, Any]:
    """Return what the forks of this process found, as their first line that begins with '={' says, or their error."""
    with tempfile.TemporaryDirectory() as folder:
        ended = run_ranks(ranks, body, Path(folder), LIMIT)
    return found_of(ended.codes, ended.said)[0]


def found_of(codes: list[int], said: list[str]) -> list[dict[str, Any]]:
    """Return what lines that begin with '={' say, and then the error of ranks that failed."""
    lines = [line for each in said for line in each.splitlines()]
    found = [json.loads(line[1:]) for line in lines if line.startswith("={")]
    return [*found, words_of(codes, said)] if any(codes) or not found else found


def words_of(codes: list[int], said: list[str]) -> dict[str, Any]:
    """Return the error, or refusal, of ranks in its own words."""
    for text in said:
        for line in text.rpartition("Traceback (most recent call last):")[2].splitlines():
            if re.match(r"[A-Za-z_][\w.]*(: |$)", line):
                kind, _, words = line.partition(": ")
                refused = kind.rpartition(".")[2] in ("ConfigError", "GeometryError")
                return {"refused" if refused else "error": words or kind}
    last = next((line for line in said[0].splitlines()[::-1] if line.strip("- ")), f"ended with {codes}")
    return {"error": f"no end within {LIMIT:.0f} s" if -9 in codes else last}


def take_ranks_part(peer: str, kind: str, ranks: int, names: list[str]) -> int:
    """Compute items one after the other as a rank of mpirun. An error that every rank has before any message lets the
    next item begin."""
    for name in names:
        try:
            Item(peer, kind, ranks, name).run()
        except (ImportError, NotImplementedError) as error:
            word = "absent" if isinstance(error, ImportError) else "error"
            if rank_of() == 0:
                print("=" + json.dumps({word: str(error)}), flush=True)
    return 0


def main() -> int:
    peer, kind, ranks, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if names[-1] == "--rank":
        return take_ranks_part(peer, kind, int(ranks), names[:-1])
    if peer != "DistDL":  # once for all forks, what the first step of each would import
        import_all()
        trace(nn.Conv2d(1, 1, 1), 1)
        import_module("torch.distributed.tensor")
    if peer == "ShardTensor":
        with stand_ins():
            import_module("physicsnemo.domain_parallel").register_custom_ops()
    while names:
        begun = time.perf_counter()
        news = outcomes(peer, kind, int(ranks), names)
        for found in news:
            print(json.dumps({**found, "took": round(time.perf_counter() - begun, 1)}), flush=True)
        names = names[len(news) :]
    return 0


if __name__ == "__main__":
    raise SystemExit(import_module("benchmarks.side_by_side.spatial").main())  # the module that peers import
