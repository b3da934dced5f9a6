"""The times that a plan waits for: of each layer, and of a message between stages. Measured, for `balance: auto`."""

from __future__ import annotations

import torch

from tiledseg.comm.mesh import Mesh
from tiledseg.execution.precision import PARAMETER_DTYPES
from tiledseg.pipeline.layer_times import LayerTime, measure_layer_times
from tiledseg.pipeline.link_time import slowest_link
from tiledseg.planning.run.pipeline import Measured
from tiledseg.planning.run.plan import RunPlan, RunQuestion, balanced


def with_times(question: RunQuestion, plan: RunPlan, mesh: Mesh) -> RunPlan:
    """The plan with its balance, where that waits for times: of layers on the root, of messages on all. Collective."""
    if not question.waits_for_times:
        return plan
    link = slowest_link(mesh.communicator, plan.spread.mesh, mesh.device)

    def decide() -> RunPlan:
        times = _layer_times(plan, question.precision, mesh.device)
        measured = Measured([time.forward for time in times], [time.backward for time in times], link.seconds)
        return balanced(question, plan, measured)

    return mesh.on_root(decide)


def _layer_times(plan: RunPlan, precision: str, device: torch.device) -> tuple[LayerTime, ...]:
    network = plan.network
    cast = torch.bfloat16 if precision == "bf16" else None
    pixels = plan.micro_batch.pixels
    return measure_layer_times(network.graph(), network.bands, pixels, device, PARAMETER_DTYPES[precision], cast)
