r"""torchgpipe (Kakao Brain's GPipe) against one process: equality, time and bytes, its partitions all on the CPU.

    PYTHONPATH=<torchgpipe> python -m benchmarks.pipeline.peers.torchgpipe_pipeline --stages 2 --checkpoint never

<torchgpipe> is a checkout of github.com/kakaobrain/torchgpipe. It is one process with a thread a device, made for GPUs
that work on while Python goes on; long skips are its `skippable` stash and pop. What a CPU makes of it, as it is: all
partitions share the CPU's one thread, and autograd runs their backward passes one after the other, so nothing runs in
parallel. `--workers partition` gives each partition a thread of its own (from outside), so that forward passes overlap;
`--threads` lets every operator use more cores instead. Between CPU devices nothing is copied: bytes are those that its
Copy and its portals carry from partition to partition. Activations that a partition meets first do not write in place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from benchmarks.measurement import measure, not_runnable
from benchmarks.pipeline.request import (
    Carried,
    Request,
    compare,
    parser_of,
    report,
    request_of,
    serial_gradients,
)
from benchmarks.pipeline.workload import (
    Gradients,
    count_valid,
    gradients_of,
    keep_stage_inputs,
    loss_of,
    make_input,
    make_network,
    make_target,
)
from tiledseg.errors import ConfigError
from tiledseg.models.network import GraphNetwork

try:
    import torchgpipe
    from torchgpipe import pipeline as their_pipeline
    from torchgpipe.copy import Copy
    from torchgpipe.skip import pop, skippable, stash
    from torchgpipe.skip.portal import PortalCopy
    from torchgpipe.worker import spawn_workers
except ImportError as error:
    not_runnable(error)

CHECKPOINTS = ("never", "except_last", "always")
WORKERS = ("device", "partition")


def stashing(module: nn.Module, tensor: str) -> nn.Module:
    """The module in torchgpipe's words, its output kept as `tensor` too."""

    @skippable(stash=[tensor])
    class Stash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, x_BCHW: torch.Tensor) -> Generator[Any, Any, torch.Tensor]:
            y_BCHW = self.module(x_BCHW)
            yield stash(tensor, y_BCHW)
            return y_BCHW

    return Stash()


def popping(join: nn.Module, tensor: str) -> nn.Module:
    """A module of two inputs in torchgpipe's words: the first is taken from afar."""

    @skippable(pop=[tensor])
    class Pop(nn.Module):
        def forward(self, x_BCHW: torch.Tensor) -> Generator[Any, Any, torch.Tensor]:
            skip_BCHW = yield pop(tensor)
            return join(skip_BCHW, x_BCHW)

    return Pop()


def as_sequence(network: GraphNetwork) -> nn.Sequential:
    """The network as torchgpipe takes it: node i becomes layer i, so a balance means the same."""
    graph = network.graph
    kept = {tensor for tensor, _ in graph.skips}
    modules: list[nn.Module] = []
    for k, module in enumerate(network.layers.values()):
        source, *others = graph.sources[k]
        found = popping(module, str(source)) if others else module
        modules.append(stashing(found, str(k + 1)) if k + 1 in kept else found)
    return nn.Sequential(*modules)


def thread_a_partition() -> None:
    """Gives each partition a worker thread, also where all are on the CPU: workers are told of devices that differ."""

    class Own:
        """A device that is like no other."""

        type, index = "cpu of a partition", None

    @contextmanager
    def spawn(devices: list[torch.device]) -> Iterator[Any]:
        with spawn_workers([Own() for _ in devices]) as queues:
            yield queues

    their_pipeline.spawn_workers = spawn


def count_copies(traffic: Carried) -> None:
    """Puts a counter in front of Copy: it carries activations by itself, skips where a portal calls it."""
    in_portal = [False]

    def counted(function: Callable[..., Any], skip: int, way: str) -> staticmethod:
        """`function`, whose arguments after the first `skip` are the tensors that it carries."""

        def copy(*given: Any) -> Any:
            for tensor in given[skip:]:
                traffic.count(f"{'skips' if in_portal[0] else 'activations'} {way}", tensor)
            return function(*given)

        return staticmethod(copy)

    def flagged(function: Callable[..., Any]) -> staticmethod:
        def carry(*given: Any) -> Any:
            in_portal[0] = True
            try:
                return function(*given)
            finally:
                in_portal[0] = False

        return staticmethod(carry)

    Copy.forward, Copy.backward = counted(Copy.forward, 3, "forward"), counted(Copy.backward, 1, "backward")
    PortalCopy.forward, PortalCopy.backward = flagged(PortalCopy.forward), flagged(PortalCopy.backward)


def run(request: Request, checkpoint: str, workers: str, threads: int) -> None:
    workload = request.workload
    torch.set_num_threads(threads)
    if workers == "partition":
        thread_a_partition()
    traffic = Carried()
    count_copies(traffic)
    network = make_network(workload)
    keep_stage_inputs(network, workload.first_layers)
    module = torchgpipe.GPipe(
        as_sequence(network),
        list(workload.balance),
        devices=["cpu"] * workload.stages,
        chunks=workload.micro_batches,
        checkpoint=checkpoint,
    )
    every = range(workload.micro_batches)
    x_BCHW = torch.cat([make_input(workload, m) for m in every])
    target_BHW, valid = torch.cat([make_target(workload, m) for m in every]), count_valid(workload)

    def step() -> float:
        network.zero_grad()
        loss = loss_of(module(x_BCHW), target_BHW, valid)
        loss.backward()
        return loss.item()

    found = Gradients(step(), gradients_of(network))
    sent = traffic.to_dict()
    equal = compare(found, serial_gradients(request))
    spent = measure(step, lambda: None, request.repeat, request.warm_up)
    ways = {"checkpoint": checkpoint, "workers": workers, "threads": threads}
    report("torchgpipe", "gpipe", request, {**spent.to_dict(), **sent, "loss": found.loss, **equal, **ways})


def main() -> int:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="never")
    parser.add_argument("--workers", choices=WORKERS, default="device", help="a thread for each")
    parser.add_argument("--threads", type=int, default=1, help="of an operator")
    given = parser.parse_args()
    try:
        run(request_of(given), given.checkpoint, given.workers, given.threads)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
