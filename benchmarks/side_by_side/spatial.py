"""One image over several ranks by each peer: is the result that of the whole image, and what does it cost?

    python -m benchmarks.side_by_side.spatial PEER capability|cost RANKS ITEM ...

prints a line of JSON an item. An item's ranks are forks of this process, over Gloo, and have `LIMIT` seconds; DistDL's
are processes under mpirun. `python -m benchmarks.side_by_side` starts it.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.foreign_networks.networks import NETWORKS
from benchmarks.launching import mpirun, run_process
from benchmarks.many_ranks.ranks import import_all, run_ranks
from benchmarks.side_by_side.layers import BANDS, SIZE, build
from benchmarks.stand_ins import stand_ins

LIMIT, PAIRS, COST_SIZE = 240.0, 5, (512, 512)
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
        gradients = {name: p.grad for name, p in spread.named_parameters() if p.grad is not None}
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
        y = module(wrap(part_BCHW, mesh, placements, x_BCHW.shape))
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

    def wrap(part_BCHW: torch.Tensor, mesh: Any, placements: Any, whole: torch.Size) -> Any:
        return DTensor.from_local(part_BCHW, mesh, placements)

    return _sharded(wrap, distribute_module(module, mesh), mesh, [3], shape)


def older_dtensor_step(module: nn.Module, ranks: int, shape: torch.Size) -> Step:
    from torch.distributed.tensor import DTensor

    strategies = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
    for operation in (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default):
        strategies.pop(operation, None)
    return dtensor_step(module, ranks, shape)


def shardtensor_step(module: nn.Module, ranks: int, shape: torch.Size) -> Step:
    from torch.distributed.device_mesh import init_device_mesh

    peer = import_module("physicsnemo.domain_parallel")
    with stand_ins():
        peer.register_custom_ops()
    mesh = init_device_mesh("cpu", mesh_of(ranks)[: 1 if ranks < 4 else 2])

    def wrap(part_BCHW: torch.Tensor, mesh: Any, placements: Any, whole: torch.Size) -> Any:
        return peer.ShardTensor.from_local(part_BCHW, mesh, placements, "chunk", whole)

    return _sharded(wrap, module, mesh, [2] if ranks < 4 else [2, 3], shape)


def distdl_step(module: nn.Module, ranks: int, shape: torch.Size) -> Step:
    return import_module("benchmarks.side_by_side.distdl_layers").step_of(module, mesh_of(ranks), shape)


DTENSOR, OLDER = "torch DTensor", "torch DTensor, older rule"
STEPS = {
    OURS: tiledseg_step,
    DTENSOR: dtensor_step,
    OLDER: older_dtensor_step,
    "ShardTensor": shardtensor_step,
    "DistDL": distdl_step,
}


def lines_of(peer: str) -> int:
    """Return how many lines the peer's step takes, without those that our comparison alone needs."""
    from benchmarks.side_by_side import distdl_layers

    own = STEPS[peer]
    parts: list[Any] = (
        [own] if peer == OURS else [dtensor_step, _sharded] if own is older_dtensor_step else [own, _sharded]
    )
    of = inspect.getsource(distdl_layers) if peer == "DistDL" else "".join(map(inspect.getsource, parts))
    return sum(bool(line.strip()) for line in of.splitlines())


class Sent(TorchDispatchMode):
    """This rank's messages and collective calls through torch, with the bytes that it hands over."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = self.calls = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func._schema.name.split("::")
        if space in ("c10d", "_c10d_functional") and not any(word in name for word in ("recv", "wait", "barrier")):
            given = args[1] if name in ("allgather_", "_allgather_base_", "alltoall_base_", "alltoall_") else args[0]
            self.messages += name == "send"
            self.calls += name != "send"
            self.bytes += sum(t.nbytes for t in torch.utils._pytree.tree_leaves(given) if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


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
    largest = max((each.abs().max() for each in expected.gradients.values()), default=torch.ones(1))
    missing = expected.gradients.keys() - gradients.keys()
    if missing:
        raise ValueError(f"no gradient of {min(missing)}")
    dw = max(
        (_far(gradients[name].reshape(each.shape), each, largest) for name, each in expected.gradients.items()),
        default=0.0,
    )
    return {"y": _far(y_BCHW, expected.y_BCHW), "dx": _far(dx_BCHW, expected.dx_BCHW), "dW": dw}


def _far(found: torch.Tensor, expected: torch.Tensor, scale: Any = None) -> float:
    far = ((found - expected).abs().max() / (expected.abs().max() if scale is None else scale)).item()
    return far if far == far else float("inf")


def whole(module: nn.Module, x_BCHW: torch.Tensor) -> Block:
    """Return the results of one process on the whole image."""
    x_BCHW = x_BCHW.clone().requires_grad_()
    y_BCHW = module(x_BCHW)
    (y_BCHW * weights(y_BCHW.shape, x_BCHW.dtype)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    assert x_BCHW.grad is not None
    return Block(y_BCHW.detach(), BATCH, x_BCHW.grad, BATCH, gradients)


def float_of(kind: str) -> torch.dtype:
    return torch.float64 if kind == "capability" else torch.float32


class Item:
    """A layer or network that a peer computes on some ranks, beside the whole image on each."""

    def __init__(self, peer: str, kind: str, ranks: int, name: str) -> None:
        self.peer, self.kind, self.ranks, self.name = peer, kind, ranks, name
        size = COST_SIZE if kind == "cost" else NETWORKS[name].size or SIZE if name in NETWORKS else SIZE
        bands = NETWORKS[name].bands if name in NETWORKS else BANDS
        draw = torch.Generator().manual_seed(5)
        self.x_BCHW = torch.randn(1, bands, *size, generator=draw, dtype=torch.float64).to(float_of(kind))
        self.module = build(name).to(float_of(kind))
        self.expected = whole(copy.deepcopy(self.module), self.x_BCHW)

    def run(self) -> int:
        """Compute it as one of the ranks, and print rank 0's line."""
        torch.set_num_threads(1)
        if self.peer != "DistDL":
            distributed.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident set begins anew
        step = STEPS[self.peer](copy.deepcopy(self.module), self.ranks, self.expected.y_BCHW.shape)
        block = step(self.x_BCHW)
        memory = max(gathered(_resident("VmHWM") - before))
        found: dict[str, Any] = compared(block, self.expected)
        if self.kind == "cost":
            found |= {**self._cost(step), "MiB": round(memory / 2**20)}
        if gathered(None) and int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))) == 0:
            print("=" + json.dumps(found), flush=True)
        if self.peer != "DistDL":
            distributed.destroy_process_group()
        return 0

    def _cost(self, step: Step) -> dict[str, Any]:
        """Count a step's messages, and time it and ours by turns."""
        with Sent() as sent:
            step(self.x_BCHW)
        steps = {"seconds": step}
        if self.peer != OURS:
            steps["seconds of ours"] = tiledseg_step(copy.deepcopy(self.module), self.ranks, self.expected.y_BCHW.shape)
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for _ in range(PAIRS + 1):
            for name, each in steps.items():
                gathered(None)
                begun, worked = time.perf_counter(), time.process_time()
                each(self.x_BCHW)
                worked = sum(gathered(time.process_time() - worked))
                taken[name].append((time.perf_counter() - begun, worked))
        turns = list(zip(taken["seconds"], taken["seconds of ours" if len(taken) > 1 else "seconds"], strict=True))[1:]
        counts = [sum(each) for each in zip(*gathered((sent.messages, sent.calls, sent.bytes)), strict=True)]
        return {
            **dict(zip(("messages", "calls", "bytes"), counts, strict=True)),
            **{name: round(statistics.median(wall for wall, _ in values[1:]), 4) for name, values in taken.items()},
            "ratio": [theirs[0] / ours[0] for theirs, ours in turns],
            "cpu": [theirs[1] / ours[1] for theirs, ours in turns],
        }


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def outcome(peer: str, kind: str, ranks: int, name: str) -> dict[str, Any]:
    """Return what an item's ranks found, or the words of their error."""
    try:
        item = Item(peer, kind, ranks, name)
    except ImportError as error:
        return {"absent": str(error)}
    if peer == "DistDL":
        done = run_process(
            mpirun(ranks, "benchmarks.side_by_side.spatial", peer, kind, str(ranks), name, "--rank"), LIMIT
        )
        codes, said = [done.code], [done.out + done.err]
    else:
        with tempfile.TemporaryDirectory() as folder:
            ended = run_ranks(ranks, item.run, Path(folder), LIMIT)
        codes, said = ended.codes, ended.said
    lines = [line for each in said for line in each.splitlines()]
    found = [json.loads(line[1:]) for line in lines if line.startswith("={")]
    if found and not any(codes):
        return found[0]
    traced = said[0].rpartition("Traceback (most recent call last):")[2] or said[-1].rpartition("Traceback")[2]
    raised = [line for line in traced.splitlines() if re.match(r"[A-Za-z_][\w.]*(:|$)", line)]
    if not raised:
        return {"error": f"no end within {LIMIT:.0f} s" if -9 in codes else f"ended with {codes}"}
    kind_of, _, words = raised[0].partition(": ")
    refused = kind_of.rpartition(".")[2] in ("ConfigError", "GeometryError")
    return {"refused" if refused else "error": words or kind_of}


def main() -> int:
    peer, kind, ranks, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if names[-1] == "--rank":
        return Item(peer, kind, int(ranks), names[0]).run()
    import_all()
    if peer == "ShardTensor":
        import_module("physicsnemo.domain_parallel")
    for name in names:
        begun = time.perf_counter()
        found = outcome(peer, kind, int(ranks), name)
        print(json.dumps({"item": name, **found, "took": round(time.perf_counter() - begun, 1)}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
