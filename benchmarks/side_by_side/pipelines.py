"""A training step of one U-Net in two stages by a pipeline, PEER, beside one process on the same micro-batches.

Prints a line of JSON. Ranks are forks of this process, over Gloo; torchgpipe's partitions are threads of it."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import pipelining
from torch.nn import functional

import tiledseg
from benchmarks.forks import import_all
from benchmarks.side_by_side.layers import unet
from benchmarks.side_by_side.spatial import OURS, Meter, by_forks, by_turns, gathered, grads_of, rank_of

MICRO_BATCHES, SIZE = 8, 192
Step = Callable[[], Any]


class Work:
    """A network and a batch, alike on every rank, and their step in one process."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = unet(16)
        self.x_BCHW = torch.randn(MICRO_BATCHES, 3, SIZE, SIZE)
        self.target_BHW = torch.randint(2, (MICRO_BATCHES, SIZE, SIZE))

    def loss(self, y_BKHW: torch.Tensor, target_BHW: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(y_BKHW, target_BHW, reduction="sum") / self.target_BHW.numel()

    def alone(self) -> None:
        """Take the micro-batches one after the other."""
        self.network.zero_grad()
        for x_BCHW, target_BHW in zip(self.x_BCHW.split(1), self.target_BHW.split(1), strict=True):
            self.loss(self.network(x_BCHW), target_BHW).backward()


def tiledseg_pipeline(work: Work) -> tuple[Step, Any]:
    pipeline = tiledseg.Pipeline(copy.deepcopy(work.network), stages=2)

    def step() -> None:
        pipeline.zero_grad()
        pipeline.step(work.x_BCHW, work.target_BHW, work.loss)

    return step, pipeline


def torch_pipeline(work: Work) -> tuple[Step, Any]:
    rank, cut = distributed.get_rank(), {"decoders.0": pipelining.SplitPoint.BEGINNING}
    pipe = pipelining.pipeline(copy.deepcopy(work.network), mb_args=(work.x_BCHW[:1],), split_spec=cut)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, MICRO_BATCHES, loss_fn=work.loss, scale_grads=False)

    def step() -> None:
        stage.submod.zero_grad()
        given = [work.x_BCHW] if rank == 0 else []
        schedule.step(*given, target=work.target_BHW if rank else None, losses=[] if rank else None)

    return step, stage.submod


def give_threads() -> None:
    """Let torchgpipe's partitions of one CPU have a thread each, as those of two GPUs have."""
    spawn = import_module("torchgpipe.worker").spawn_workers
    own = type("Own", (), {"type": "cpu of a partition", "index": None})  # a device that is like no other
    setattr(import_module("torchgpipe.pipeline"), "spawn_workers", lambda each: spawn([own() for _ in each]))  # noqa: B010


class Passing(nn.Module):
    """A part of a network, which reads the last of some tensors: the others are for later parts."""

    def __init__(self, part: nn.Module, keeps: bool = False, joins: bool = False) -> None:
        super().__init__()
        self.part, self.keeps, self.joins = part, keeps, joins

    def forward(self, given: Any) -> Any:
        *kept, x_BCHW = given if isinstance(given, tuple) else (given,)
        y_BCHW = self.part(torch.cat([kept.pop(), x_BCHW], 1) if self.joins else x_BCHW)
        kept += [y_BCHW, y_BCHW] if self.keeps else [y_BCHW]
        return tuple(kept) if len(kept) > 1 else y_BCHW


def torchgpipe_pipeline(work: Work) -> tuple[Step, Any]:
    net = work.network
    down, up, join = net.encoders, net.ups, net.decoders
    before = Passing(down[0], keeps=True), net.pool, Passing(down[1], keeps=True), nn.MaxPool2d(2), down[2], up[0]
    parts = *before, Passing(join[0], joins=True), up[1], Passing(join[1], joins=True), net.head
    sequence = nn.Sequential(*(part if isinstance(part, Passing) else Passing(part) for part in parts))
    peer = import_module("torchgpipe")
    module = peer.GPipe(sequence, [6, 4], devices=["cpu"] * 2, chunks=MICRO_BATCHES, checkpoint="never")

    def step() -> None:
        work.network.zero_grad()
        work.loss(module(work.x_BCHW), work.target_BHW).backward()

    return step, None


MAKERS: dict[str, Callable[[Work], tuple[Step, Any]]] = {
    OURS: tiledseg_pipeline,
    "torch.distributed.pipelining": torch_pipeline,
    "torchgpipe": torchgpipe_pipeline,
}


def measured(peer: str) -> dict[str, Any]:
    """Compare and time a pipeline and one process by turns; rank 1 waits while rank 0 works alone."""
    torch.set_num_threads(1)
    if peer == "torchgpipe":
        give_threads()
    else:
        distributed.init_process_group("gloo")
    work = Work()
    work.alone()
    expected = grads_of(work.network)
    step, module = MAKERS[peer](work)
    step()
    found = grads_of(module or work.network)
    largest = max(each.abs().max() for each in expected.values())
    far = max(((found[name] - expected[name]).abs().max() / largest).item() for name in found)
    fars, names = zip(*gathered((far, list(found))), strict=True)
    if missing := expected.keys() - {name for each in names for name in each}:
        raise ValueError(f"no gradient of {min(missing)}")
    with Meter(()):
        step()
    sent = sum(gathered(sum(size for kind, size in Meter.ALL.items() if "bytes" in kind)))
    turns = by_turns(work.alone if rank_of() == 0 else lambda: None, step)
    speed_ups = [round(alone[0] / piped[0], 3) for alone, piped in turns]
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return {"far": float(f"{max(fars):.1e}"), "speed_up": speed_ups, "bytes": sent}


def main() -> int:
    warnings.simplefilter("ignore")
    import_all()
    print(json.dumps(by_forks(1 if sys.argv[1] == "torchgpipe" else 2, partial(measured, sys.argv[1]))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
