"""The times that a plan waits for: of each layer, and of a message between stages. Measured, for `balance: auto`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tiledseg.comm.mesh import Mesh
from tiledseg.execution.precision import CAST_DTYPES, PARAMETER_DTYPES
from tiledseg.planning.run.pipeline import MeasuredTimes
from tiledseg.planning.run.plan import RunPlan, balanced
from tiledseg.planning.run.question import RunQuestion

if TYPE_CHECKING:
    from tiledseg.pipeline.layer_times import LayerTime


def with_times(question: RunQuestion, plan: RunPlan, mesh: Mesh) -> RunPlan:
    """Return the plan with its balance, where that waits for times: of layers on the root, of messages on all.
    Collective.

    Layers of traced networks that cannot be measured are balanced as `modelled` balances them.
    """
    if not question.waits_for_times:
        return plan
    from tiledseg.pipeline.layer_times import can_be_measured, slowest_link

    if not can_be_measured(question.graph):
        return balanced(question, plan)

    link = slowest_link(mesh.communicator, plan.spread.mesh, mesh.device)

    def decide() -> RunPlan:
        times = _layer_times(question, plan, mesh.device)
        measured = MeasuredTimes([time.forward for time in times], [time.backward for time in times], link.seconds)
        return balanced(question, plan, measured)

    return mesh.on_root(decide)


def _layer_times(question: RunQuestion, plan: RunPlan, device: torch.device) -> tuple[LayerTime, ...]:
    from tiledseg.pipeline.layer_times import measure_layer_times

    cast = CAST_DTYPES.get(question.precision)
    pixels, dtype = plan.micro_batch.pixels, PARAMETER_DTYPES[question.precision]
    return measure_layer_times(question.graph, plan.network.bands, pixels, device, dtype, cast)
