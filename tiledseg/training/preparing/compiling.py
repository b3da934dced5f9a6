"""What `train.compile: on` needs of a run: a whole network on each tile, all of it kept, and a compiler."""

from __future__ import annotations

import torch

from tiledseg.errors import ConfigError
from tiledseg.geometry.memory_policy import named_policy
from tiledseg.planning.run.plan import RunPlan
from tiledseg.training.preparing.preparation import Preparation


def check_compiling(preparation: Preparation, device: torch.device) -> None:
    """Raise ConfigError where a run that is to be compiled cannot be."""
    found = why_uncompiled(preparation)
    if found is not None:
        raise ConfigError(found)
    if preparation.recipe.compiles:
        from tiledseg.models.compiled import check_compiler

        check_compiler(device)


def why_uncompiled(preparation: Preparation) -> str | None:
    """What stands against it on any device, of a run that is to be compiled."""
    found = _obstacle(preparation.plan, preparation.recipe.recompute) if preparation.recipe.compiles else None
    return None if found is None else f"train.compile is on, which takes a network whole, but {found}"


def _obstacle(plan: RunPlan, recompute: str) -> str | None:
    """Why the network does not go through its tiles whole, and what to do."""
    graph, bands = plan.network.graph(), plan.network.bands
    asking = [node.name for node in graph.nodes if node.layer.asks_place]
    reasons = {
        "parallel.halo is layer; give read or exchange": plan.spread.shares_layers,
        "parallel.stages cut it; give 1": plan.pipeline is not None or plan.spread.mesh.stages > 1,
        "memory.blocks cuts tiles; leave it out": plan.blocks is not None,
        "memory.budget has it computed once more; give a larger one, or compile off": plan.rebuilt is not None,
        "memory.recompute has it computed once more; give auto": not named_policy(graph, bands, recompute).keeps_all,
        "memory.offload moves what it keeps; leave it out": plan.offloaded is not None,
        f"{next(iter(asking), '')} depends on its place in the image; give compile off": len(asking) > 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
