r"""This project's pipeline on the workload: equality, time and bytes, one rank a stage.

    mpirun -n 2 python -m benchmarks.pipeline.ours --stages 2 --schedule 1f1b --layout channels_last

`--measured` balances by the times of the layers on this machine, as `parallel.balance: auto` does, where no balance is
given. Gradients are those of the weights, as the peers' are: nothing is summed over replicas.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from tiledseg.comm.session import leave, run_on_mesh
from tiledseg.config.run import ParallelConfig
from tiledseg.config.schedules import SCHEDULES
from tiledseg.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    import torch

    from benchmarks.pipeline.request import Request
    from benchmarks.pipeline.workload import Workload
    from tiledseg.comm.mesh import Mesh
    from tiledseg.models.network import GraphNetwork, Tensors
    from tiledseg.planning.run.pipeline import PipelinePlan


def plan(workload: Workload, schedule: str, recompute: str, measured: bool, mesh: Mesh) -> PipelinePlan:
    """The pipeline as a run would plan it; the measured one by the times on rank 0 and of messages. Collective."""
    from tiledseg.geometry.sharing.mesh_shape import MeshShape
    from tiledseg.pipeline.layer_times import measure_layer_times
    from tiledseg.pipeline.link_time import slowest_link
    from tiledseg.planning.run.parallelism import parallelism
    from tiledseg.planning.run.pipeline import Measured, MicroBatchSize, plan_pipeline

    layers, size = workload.unet.graph(), (workload.size, workload.size)
    largest = MicroBatchSize(size, workload.micro_batches, 4)
    given = "auto" if measured or schedule == "folded" else list(workload.balance)
    parallel = ParallelConfig(stages=workload.stages, balance=given, schedule=schedule, recompute=recompute)

    link = slowest_link(mesh.communicator, MeshShape(1, 1, 1, workload.stages), mesh.device) if measured else None

    def decide() -> PipelinePlan:
        times = None
        if link is not None:
            seconds = measure_layer_times(layers, workload.bands, size, mesh.device, workload.torch_dtype)
            times = Measured([s.forward for s in seconds], [s.backward for s in seconds], link.seconds)
        found = plan_pipeline(parallelism(parallel), layers, workload.bands, largest, None, times)
        assert found is not None, "a pipeline has two stages at least"
        return found

    return mesh.on_root(decide)


class Images:
    """The workload's micro-batches, of one image each, as the executor takes them."""

    images = 1

    def __init__(self, workload: Workload, network: GraphNetwork, number: int, valid: int, losses: list[float]) -> None:
        from benchmarks.pipeline.workload import make_input, make_target
        from tiledseg.geometry.shapes import tensor_shapes

        self.network, self.valid, self.losses = network, valid, losses
        self.shapes = tensor_shapes(workload.unet.graph(), workload.bands, workload.size, workload.size)
        self.x_BCHW = make_input(workload, number)
        self.target_BHW = make_target(workload, number)

    def source(self) -> torch.Tensor:
        return self.x_BCHW

    def run_nodes(self, tensors: Tensors, first: int, stop: int) -> None:
        self.network.run_nodes(tensors, first, stop)

    def loss(self, *outputs_BKHW: torch.Tensor) -> torch.Tensor:
        from benchmarks.pipeline.workload import loss_of

        loss = loss_of(outputs_BKHW[0], self.target_BHW, self.valid)
        self.losses.append(loss.item())
        return loss


def run(mesh: Mesh, request: Request, schedule: str, recompute: str, measured: bool) -> None:
    import torch

    from benchmarks.measurement import Spent, measure
    from benchmarks.pipeline.request import compare, report, serial_gradients
    from benchmarks.pipeline.workload import Gradients, count_valid, gradients_of, make_network
    from tiledseg.comm.axes import open_axes
    from tiledseg.geometry.sharing.mesh_shape import MeshShape
    from tiledseg.pipeline.executor import PipelineExecutor
    from tiledseg.pipeline.partition import split_network

    torch.set_num_threads(1)
    workload = request.workload
    found_plan = plan(workload, schedule, recompute, measured, mesh)
    workload = replace(workload, balance=found_plan.balance if schedule != "folded" else workload.balance)
    axes = open_axes(mesh, MeshShape(1, 1, 1, workload.stages))
    network = make_network(workload)
    split = split_network(network, found_plan, mesh.rank, mesh.device, workload.torch_dtype)
    executor = PipelineExecutor(split, axes)
    losses: list[float] = []
    valid = count_valid(workload)
    images = [Images(workload, network, m, valid, losses) for m in range(workload.micro_batches)]
    busy: list[float] = []

    def step() -> None:
        for parameter in network.parameters():
            parameter.grad = None
        losses.clear()
        executor.busy.reset()
        executor.train(images, lambda parameters: None)
        busy.append(executor.busy.seconds())

    traffic = axes.stage_messages.meter
    traffic.reset()
    step()
    sent = mesh.communicator.gather_objects((traffic.bytes, traffic.messages))
    parts = mesh.communicator.gather_objects((gradients_of(network), sum(losses)))
    equal = {}
    if mesh.is_root:
        whole = {name: tensor for gradients, _ in parts for name, tensor in gradients.items()}
        loss = sum(part for _, part in parts)
        equal = {"loss": loss, **compare(Gradients(loss, whole), serial_gradients(replace(request, workload=workload)))}
    busy.clear()
    spent = mesh.communicator.gather_objects(measure(step, mesh.communicator.barrier, request.repeat, request.warm_up))
    by_stage = mesh.communicator.gather_objects(busy[request.warm_up :])
    if mesh.is_root:
        figures = {"bytes_sent": sum(b for b, _ in sent), "messages": sum(m for _, m in sent)}
        figures |= Spent.together(spent).to_dict()
        figures |= {"busy_seconds": by_stage, "transport": mesh.transport, "chunks": list(found_plan.balance)}
        figures |= {"recompute": recompute}
        report("tiledseg", schedule, replace(request, workload=workload), {**figures, **equal})
    axes.close()


def main() -> int:
    def body(mesh: Mesh) -> None:
        given = parse()
        from benchmarks.pipeline.request import request_of

        request = request_of(given)
        if request.workload.stages != mesh.size:
            need = request.workload.stages
            raise ConfigError(f"{need} stages need {need} ranks, not {mesh.size}; start {need}")
        run(mesh, request, given.schedule, given.recompute, given.measured)

    transport = "mpi" if "--over-mpi" in sys.argv else "gloo"
    return run_on_mesh(body, transport)


def parse() -> argparse.Namespace:
    from benchmarks.pipeline.request import parser_of

    parser = parser_of(__doc__ or "")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--recompute", choices=("never", "except_last", "always"), default="never")
    parser.add_argument("--measured", action="store_true", help="balance by measured times")
    parser.add_argument("--over-mpi", action="store_true", help="messages over MPI, not Gloo")
    return parser.parse_args()


if __name__ == "__main__":
    leave(main())
