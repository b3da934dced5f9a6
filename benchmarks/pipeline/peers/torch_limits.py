r"""What torch.distributed.pipelining carries and what not: small cases, each a job of its own (decision 0009).

    python -m benchmarks.pipeline.peers.torch_limits [CASE ...]

Prints a line a case: equal to one process or not, the error's first line, or that it hangs (25 s; a sound case takes
less than ten). A case is started by mpirun as `torch_limits --run CASE`. All in float64 over Gloo on the CPU, with
the tracer frontend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiledseg.comm.session import leave, run_on_mesh

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tiledseg.comm.mesh import Mesh

SECONDS = 25
SIZE, CHANNELS = 16, 3


@dataclass(frozen=True)
class Case:
    """A network split in front of some layers, a schedule, and the images of each micro-batch."""

    what: str
    ranks: int
    schedule: str
    micro_batches: int
    network: str = "unet"
    cuts: tuple[str, ...] = ()
    images: int = 1
    sizes: tuple[int, ...] = ()  # of each micro-batch, where they differ
    layout: str = "contiguous"


UNET_CUTS = ("layers.encoder2-conv1", "layers.decoder2-conv1", "layers.decoder0-up")
CASES = {
    "skips-2-gpipe": Case("skips over 1 cut", 2, "ScheduleGPipe", 6, cuts=UNET_CUTS[1:2]),
    "skips-2-1f1b": Case("skips over 1 cut", 2, "Schedule1F1B", 6, cuts=UNET_CUTS[1:2]),
    "skips-3-gpipe": Case("skips over 2 cuts", 3, "ScheduleGPipe", 6, cuts=UNET_CUTS[:2]),
    "skips-3-1f1b": Case("skips over 2 cuts", 3, "Schedule1F1B", 6, cuts=UNET_CUTS[:2]),
    "skips-4-gpipe": Case("skips over 3 cuts", 4, "ScheduleGPipe", 6, cuts=UNET_CUTS),
    "skips-4-1f1b": Case("skips over 3 cuts", 4, "Schedule1F1B", 6, cuts=UNET_CUTS),
    "consumers-same": Case("a skip popped twice by one stage", 2, "ScheduleGPipe", 4, "twice", ("mid",)),
    "consumers-two": Case("a skip popped by two stages", 3, "ScheduleGPipe", 4, "twice", ("mid", "more")),
    "cut-at-pool": Case(
        "a cut between a stash and its pool, popped later",
        3,
        "ScheduleGPipe",
        4,
        cuts=("layers.encoder1-pool", "layers.decoder1-pop"),
    ),
    "few-gpipe": Case("1 micro-batch, 2 stages", 2, "ScheduleGPipe", 1, cuts=UNET_CUTS[1:2]),
    "few-1f1b": Case("1 micro-batch, 2 stages", 2, "Schedule1F1B", 1, cuts=UNET_CUTS[1:2]),
    "edge-tiles": Case(
        "the last micro-batch is smaller", 2, "ScheduleGPipe", 4, cuts=UNET_CUTS[1:2], sizes=(16, 16, 16, 8)
    ),
    "edge-tiles-larger": Case(
        "the last micro-batch is larger", 2, "ScheduleGPipe", 4, cuts=UNET_CUTS[1:2], sizes=(16, 16, 16, 24)
    ),
    "two-images": Case("2 images a micro-batch", 2, "ScheduleGPipe", 4, cuts=UNET_CUTS[1:2], images=2),
    "channels-last": Case("channels last", 2, "ScheduleGPipe", 4, cuts=UNET_CUTS[1:2], layout="channels_last"),
    "folded": Case("4 chunks folded on 2 ranks", 2, "ScheduleZBVZeroBubble", 4, cuts=UNET_CUTS),
    "interleaved": Case("4 chunks in turn on 2 ranks", 2, "ScheduleInterleaved1F1B", 4, cuts=UNET_CUTS),
    "batch-norm": Case("batch norm and its buffers", 2, "ScheduleGPipe", 4, "batch norm", UNET_CUTS[1:2]),
    "recompute": Case("layers under torch.utils.checkpoint", 2, "ScheduleGPipe", 4, "checkpointed", ("mid",)),
}


def networks() -> dict[str, Callable[[], nn.Module]]:
    """The networks by name; torch is imported late, after MPI."""
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    from tiledseg.architecture.unet import UNet
    from tiledseg.models.network import build_modules

    class Twice(nn.Module):
        """The first layer's output is taken up by the second and by the third."""

        def __init__(self, recompute: bool = False) -> None:
            super().__init__()
            self.first = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
            self.mid = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
            self.more = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
            self.end = nn.Conv2d(CHANNELS, 2, 3, padding=1)
            self.recompute = recompute

        def middle(self, x_BCHW: torch.Tensor) -> torch.Tensor:
            return self.more(self.mid(x_BCHW).relu()).relu()

        def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
            skip = self.first(x_BCHW).relu()
            if self.recompute:
                return self.end(checkpoint(self.middle, skip, use_reentrant=False))
            y_BCHW = self.mid(skip).relu() + skip
            return self.end(self.more(y_BCHW).relu() + skip)

    return {
        "unet": lambda: build_modules(UNet(4, base_channels=4, bands=CHANNELS), seed=0),
        "batch norm": lambda: build_modules(UNet(4, base_channels=4, bands=CHANNELS, norm="batch"), seed=0),
        "twice": lambda: Twice(),
        "checkpointed": lambda: Twice(recompute=True),
    }


def build(case: Case) -> nn.Module:
    """The network with the same weights on every rank, in float64; nothing writes in place."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    network = networks()[case.network]().double()
    for module in network.modules():
        if isinstance(module, nn.LeakyReLU):
            module.inplace = False
    return network


def draw(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Inputs and targets of each micro-batch."""
    import torch

    torch.manual_seed(1)
    sizes = case.sizes or (SIZE,) * case.micro_batches
    form = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}[case.layout]
    inputs = [
        torch.randn(case.images, CHANNELS, n, n, dtype=torch.float64).contiguous(memory_format=form) for n in sizes
    ]
    return inputs, [torch.randint(2, (case.images, n, n)) for n in sizes]


def loss_of(y_BCHW: torch.Tensor, target_BHW: torch.Tensor) -> torch.Tensor:
    from torch.nn import functional

    return functional.cross_entropy(y_BCHW, target_BHW, reduction="sum")


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients, and buffers that are numbers."""
    found = {name: tensor.grad for name, tensor in module.named_parameters() if tensor.grad is not None}
    return found | {name: tensor for name, tensor in module.named_buffers() if tensor.is_floating_point()}


def serial(case: Case) -> dict[str, torch.Tensor]:
    network = build(case)
    for x_BCHW, target_BHW in zip(*draw(case), strict=True):
        loss_of(network(x_BCHW), target_BHW).backward()
    return state_of(network)


def pipelined(case: Case, rank: int) -> tuple[dict[str, torch.Tensor], str]:
    """This rank's gradients and buffers, and what it kept while it ran."""
    import torch
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    inputs, targets = draw(case)
    split = dict.fromkeys(case.cuts, pipelining.SplitPoint.BEGINNING)
    pipe = pipelining.pipeline(build(case), mb_args=(inputs[0],), split_spec=split)
    kind = getattr(schedules, case.schedule)
    device, several = torch.device("cpu"), issubclass(kind, schedules.PipelineScheduleMulti)
    mine = chunks_of(case, rank)
    stages = [pipe.build_stage(chunk, device) for chunk in mine]
    steps = kind(stages if several else stages[0], case.micro_batches, loss_fn=loss_of, scale_grads=False)
    most = watch(stages)
    if several:  # its greeting of neighbours greets its own rank too, which Gloo cannot
        for stage in stages:
            stage._get_init_p2p_neighbors_ops = list
    first, last = 0 in mine, len(case.cuts) in mine
    if case.sizes:  # `step` takes one tensor only, so micro-batches of several sizes are handed to what it calls
        stages[0].has_backward = True
        arguments = [(x_BCHW,) for x_BCHW in inputs] if first else None
        steps._step_microbatches(arguments, None, targets if last else None)
    else:
        whole = (torch.cat(inputs),) if first else ()
        steps.step(*whole, target=torch.cat(targets) if last else None)
    return {name: tensor for stage in stages for name, tensor in state_of(stage.submod).items()}, most()


def chunks_of(case: Case, rank: int) -> tuple[int, ...]:
    """The chunks of this rank: its own, or with more cuts than ranks two, laid out as the schedule wants."""
    chunks = len(case.cuts) + 1
    if chunks == case.ranks:
        return (rank,)
    return (rank, chunks - 1 - rank) if case.schedule == "ScheduleZBVZeroBubble" else (rank, rank + case.ranks)


def watch(stages: Sequence[Any]) -> Callable[[], str]:
    """Follows how many micro-batches the first stage keeps; says the most, and the bytes of its receive buffers."""
    stage, most = stages[0], [0]
    plain = stage.forward_one_chunk

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = plain(*args, **kwargs)
        most[0] = max(most[0], len(stage.fwd_cache))
        return found

    stage.forward_one_chunk = forward

    def said() -> str:
        infos = [info for m in (stage.args_recv_info, stage.grad_recv_info) for part in m.values() for info in part]
        buffers = sum(info.buffer.nbytes for info in infos if info.buffer is not None)
        return f"{most[0]} in flight, {buffers} B of receive buffers"

    return said


def run(name: str) -> int:
    case = CASES[name]

    def body(mesh: Mesh) -> None:
        import torch

        torch.set_num_threads(1)
        found, said = pipelined(case, mesh.communicator.rank)
        parts = mesh.communicator.gather_objects((found, said))
        if mesh.communicator.rank == 0:
            whole = {key: tensor for part, _ in parts for key, tensor in part.items()}
            print(f"{verdict(whole, serial(case))}; by rank: {'; '.join(text for _, text in parts)}", flush=True)

    return run_on_mesh(body, "gloo")


def verdict(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> str:
    if found.keys() != exact.keys():
        return f"DIFFERS: names {sorted(found.keys() ^ exact.keys())[:4]}"
    worst = max(((found[name] - tensor).abs().max() / tensor.abs().max()).item() for name, tensor in exact.items())
    return f"{'equal' if worst < 1e-12 else 'DIFFERS'}, by {worst:.1e}"


def told(name: str) -> str:
    """What a job says of its case."""
    from benchmarks.launching import mpirun, run_process
    from tiledseg.errors import CommunicationError

    try:
        done = run_process(mpirun(CASES[name].ranks, "benchmarks.pipeline.peers.torch_limits", "--run", name), SECONDS)
    except CommunicationError:
        return f"hangs (ended after {SECONDS} s)"
    if done.code == 0:
        return done.out.splitlines()[-1]
    errors = [line.strip() for line in done.err.splitlines() if "Error: " in line and "error: rank" not in line]
    own = [line for line in errors if "gloo/" not in line]  # a rank that lost another says so as well
    return f"fails: {(own or errors or [done.reason])[-1]}"


def main() -> int:
    if sys.argv[1:2] == ["--run"]:
        return run(sys.argv[2])
    for name in sys.argv[1:] or CASES:
        case = CASES[name]
        print(f"{name:18} {case.what}, {case.schedule}, {case.ranks} ranks: {told(name)}", flush=True)
    return 0


if __name__ == "__main__":
    leave(main())
