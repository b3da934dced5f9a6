"""A checkpoint's tensors from all stages of a pipeline on one rank: the checkpoint knows nothing of the split."""

from __future__ import annotations

import torch

from tiledseg.checkpoint.folder import Contents
from tiledseg.comm.axes import Axes
from tiledseg.comm.transports.point_to_point import Message


def collect(own: Contents, axes: Axes) -> Contents | None:
    """The contents of all stages on the rank of stage 0; None on the others. Collective over a pipeline.

    It cannot deadlock: stage 0 receives tensor by tensor in the order of stages and names, which all know beforehand,
    and each other stage does nothing but send its own in that order.
    """
    if axes.shape.stages == 1 or axes.position is None:
        return own
    named = {("weights", name): tensor for name, tensor in own.weights.items()}
    named |= {("state", name): tensor for name, tensor in own.optimizer.items()}
    named |= {("average", name): tensor for name, tensor in own.average.items()}
    kinds = axes.pipeline.gather_objects([(key, tensor.shape, tensor.dtype) for key, tensor in named.items()])
    if axes.position.stage > 0:
        for tensor in named.values():
            axes.stage_messages.start([Message(axes.rank_of_stage(0), tensor)], []).wait()
        return None
    for stage, theirs in enumerate(kinds[1:], start=1):
        for key, shape, dtype in theirs:
            named[key] = torch.empty(shape, dtype=dtype)
            axes.stage_messages.start([], [Message(axes.rank_of_stage(stage), named[key])]).wait()
    weights, state, average = (
        {name: tensor for (kind, name), tensor in named.items() if kind == wanted}
        for wanted in ("weights", "state", "average")
    )
    return Contents(weights, state, own.groups, average)
