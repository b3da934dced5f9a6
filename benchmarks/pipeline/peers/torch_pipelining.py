r"""torch.distributed.pipelining (tracer frontend) against one process: equality, time and bytes, on CPUs over Gloo.

    mpirun -n 2 python -m benchmarks.pipeline.peers.torch_pipelining --stages 2 --schedule 1f1b

One rank a stage. The network is traced by torch.export and split in front of the layers at which the balance cuts. The
loss function divides the sum by the number of valid pixels; torch's own division by the number of micro-batches is
turned off. Bytes are counted at `isend`, where every message passes. One change from outside: activations that a stage
meets first do not write in place, since torch hands a stage leaves of autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tiledseg.comm.session import leave, run_on_mesh
from tiledseg.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.pipeline.request import Carried, Request
    from tiledseg.comm.mesh import Mesh
    from tiledseg.comm.transports.stopwatch import Stopwatch

SCHEDULES = ("gpipe", "1f1b")


def count_sends(traffic: Carried, rank: int) -> None:
    """Puts a counter in front of torch's `isend`."""
    from torch import distributed
    from torch.distributed import distributed_c10d

    plain = distributed_c10d.isend

    def counted(tensor: Any, dst: int | None = None, *args: Any, group_dst: int | None = None, **kwargs: Any) -> Any:
        target = dst if dst is not None else group_dst
        assert target is not None
        traffic.count(f"{rank} > {target}", tensor)
        return plain(tensor, dst, *args, group_dst=group_dst, **kwargs)

    distributed.isend = distributed_c10d.isend = counted  # type: ignore[assignment]


def watch_computations(stage: Any) -> Stopwatch:
    """Runs along with a stage's forward and backward passes; messages are waited for outside them."""
    import torch

    from tiledseg.comm.transports.stopwatch import Stopwatch

    watch = Stopwatch(torch.device("cpu"))

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with watch.running():
                return function(*args, **kwargs)

        return run

    for name in ("forward_one_chunk", "backward_one_chunk"):
        setattr(stage, name, watched(getattr(stage, name)))
    return watch


def build_schedule(request: Request, schedule: str, rank: int, loss: Callable[..., Any]) -> Any:
    """This rank's stage of the traced network, in a schedule."""
    import torch
    from torch.distributed import pipelining

    from benchmarks.pipeline.workload import keep_stage_inputs, make_input, make_network

    workload = request.workload
    network = make_network(workload)
    keep_stage_inputs(network, workload.first_layers)
    names = list(network.layers)
    split = {f"layers.{names[first]}": pipelining.SplitPoint.BEGINNING for first in workload.first_layers[1:]}
    pipe = pipelining.pipeline(network, mb_args=(make_input(workload, 0),), split_spec=split)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    kind = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[schedule]
    return kind(stage, workload.micro_batches, loss_fn=loss, scale_grads=False)


def run(mesh: Mesh, request: Request, schedule: str) -> None:
    import torch

    from benchmarks.measurement import Spent, measure
    from benchmarks.pipeline.request import Carried, compare, report, serial_gradients
    from benchmarks.pipeline.workload import Gradients, count_valid, gradients_of, loss_of, make_input, make_target

    workload, rank = request.workload, mesh.communicator.rank
    last = workload.stages - 1
    torch.set_num_threads(1)
    traffic = Carried()
    count_sends(traffic, rank)
    steps = build_schedule(request, schedule, rank, partial(loss_of, valid=count_valid(workload)))
    module = steps._stage.submod
    every = range(workload.micro_batches)
    inputs = [torch.cat([make_input(workload, m) for m in every])] if rank == 0 else []
    target = torch.cat([make_target(workload, m) for m in every]) if rank == last else None
    losses: list[torch.Tensor] = []
    busy: list[float] = []
    watch = watch_computations(steps._stage)

    def step() -> None:
        module.zero_grad()
        watch.reset()
        steps.step(*inputs, target=target, losses=losses if rank == last else None, return_outputs=False)
        busy.append(watch.seconds())

    step()  # the first one also exchanges what torch needs to know
    traffic.clear()
    step()
    sent = Carried.together(mesh.communicator.gather_objects(traffic))
    found = mesh.communicator.gather_objects((gradients_of(module), sum(loss.item() for loss in losses)))
    equal = {}
    if rank == 0:
        whole = {name: tensor for gradients, _ in found for name, tensor in gradients.items()}
        equal = {"loss": found[last][1], **compare(Gradients(found[last][1], whole), serial_gradients(request))}
    busy.clear()
    spent = mesh.communicator.gather_objects(measure(step, mesh.communicator.barrier, request.repeat, request.warm_up))
    by_stage = mesh.communicator.gather_objects(busy[request.warm_up :])
    if rank == 0:
        figures = {**Spent.together(spent).to_dict(), "busy_seconds": by_stage, **sent.to_dict(), **equal}
        report("torch.distributed.pipelining", schedule, request, figures)


def main() -> int:
    def body(mesh: Mesh) -> None:
        from benchmarks.pipeline.request import parser_of, request_of

        parser = parser_of(__doc__ or "")
        parser.add_argument("--schedule", choices=SCHEDULES, default="gpipe")
        given = parser.parse_args()
        request = request_of(given)
        if request.workload.stages != mesh.communicator.size:
            need, have = request.workload.stages, mesh.communicator.size
            raise ConfigError(f"{need} stages need {need} ranks, not {have}; start {need}, or give --stages {have}")
        run(mesh, request, given.schedule)

    return run_on_mesh(body, "gloo")


if __name__ == "__main__":
    leave(main())
