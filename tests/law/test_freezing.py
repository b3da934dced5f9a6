"""The law of frozen weights: losses and weights are those of torch's own network with `requires_grad` False there;
and of statistics that stand still: those of torch's batch norm in evaluation, in a module that is trained.

In every halo mode and with two stages, of which the first is frozen from end to end: no gradient comes back to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.law.cases import IGNORED, KEY, Case, as_batch
from tests.law.steps import losses_of_steps
from tests.law.test_batch_norm import native
from tests.law.test_halo_modes import difference
from tests.law.test_in_order import Strip
from tests.law.test_pipelines import plans
from tiledseg.architecture.unet import UNet
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import OptimizerConfig, ParallelConfig
from tiledseg.execution.agreement import own_state
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.models.frozen import factor_of, freeze
from tiledseg.models.network import GraphNetwork
from tiledseg.training.steps.optimizer import build_optimizer, parameter_groups
from tiledseg.training.steps.step import Stepper, StepRules

STEPS = 3
ENCODER, MIDDLE = {"encoder*": 0.0, "bottom*": 0.0}, {"encoder0*": 0.0, "*.bias": 0.0, "decoder*": 0.0}
CASE = Strip(UNet(3, 1, 3, 4, "same", "pixel", "bilinear", bands=2, classes=3), (4, 3))
MEASURED = Strip(replace(CASE.unet, norm="batch"), (4, 3))  # exact in mode layer


@dataclass(frozen=True)
class Still(Strip):
    """Batch norms with statistics of other data, which stand still."""

    def network(self, dtype: torch.dtype = torch.float64) -> GraphNetwork:
        network, draw = super().network(dtype), torch.Generator().manual_seed(4)
        for module in network.layers.values():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(generator=draw)
                module.running_var.uniform_(0.5, 2.0, generator=draw)
        return network.hold_statistics()


def in_evaluation(module: nn.Module) -> nn.Module:
    """torch's own batch norm with the same statistics, in evaluation."""
    if not isinstance(module, nn.BatchNorm2d):
        return module
    norm = native(module).eval()
    norm.load_state_dict(module.state_dict())
    return norm


STILL = Still(MEASURED.unet, (4, 3))
Found = tuple[list[float | None], dict[str, torch.Tensor]]


def whole(case: Case, factors: dict[str, float]) -> Found:
    """By torch alone, on the undivided raster."""
    network = case.network().train()
    other = in_evaluation if isinstance(case, Still) else native
    network.layers.update({name: other(module) for name, module in network.layers.items()})
    for name, parameter in network.parameters_by_node():
        parameter.requires_grad = factor_of(name, factors) != 0
    sample = case.dataset((1, 1)).load(0, 0)
    target_BHW = torch.from_numpy(sample.y_HW).long()[None]
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
    losses: list[float | None] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        core_BKHW = network(as_batch(sample.x_CHW))[(slice(None), slice(None), *sample.tile.core_in_output.slices)]
        loss = functional.cross_entropy(core_BKHW, target_BHW, ignore_index=IGNORED)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, network.state_dict()


def ours(case: Case, factors: dict[str, float], parallel: ParallelConfig, mesh: Mesh) -> Found:
    network, dataset = freeze(case.network(), factors).train(), case.dataset()
    spread, pipeline = plans(case, parallel, mesh.size)
    run = ParallelRun.open(spread, network, mesh, "fp64", pipeline)
    update = OptimizerConfig(lr=0.01, weight_decay=0.1, lr_factors=factors)
    optimizer = build_optimizer(parameter_groups(network.parameters_by_node(), update), update)
    passes = run.over(dataset.tilings)
    stepper = Stepper(optimizer, mesh, passes, run.axes, StepRules(IGNORED, KEY.seed))
    losses = losses_of_steps(stepper, passes, dataset, STEPS)
    run.close()
    assert gathered(network, optimizer) == set()
    return losses, own_state(network)


def gathered(network: GraphNetwork, optimizer: torch.optim.Optimizer) -> set[str]:
    """The frozen weights of which the optimizer keeps something, or that have a gradient."""
    frozen = [(name, p) for name, p in network.parameters_by_node() if not p.requires_grad]
    return {name for name, p in frozen if p.grad is not None or p in optimizer.state}


def check(case: Case, factors: dict[str, float], parallel: ParallelConfig, mesh: Mesh) -> None:
    torch.set_num_threads(1)
    losses, own = ours(case, factors, parallel, mesh)
    together = {name: t for part in mesh.communicator.gather_objects(own) for name, t in part.items()}
    expected_losses, expected = mesh.on_root(lambda: whole(case, factors))
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert together.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(together[name], tensor, rtol=1e-12, atol=1e-12), name
    assert difference(case.network().state_dict(), expected) > 1e-3, "weights have moved"


@pytest.mark.mpi
@pytest.mark.parametrize("factors", [ENCODER, MIDDLE], ids=["encoder", "middle"])
@pytest.mark.parametrize(
    ("case", "halo", "overlap"),
    [
        (CASE, "read", False),
        (CASE, "exchange", False),
        (CASE, "layer", True),
        (MEASURED, "layer", False),
        (STILL, "read", False),
        (STILL, "exchange", False),
        (STILL, "layer", True),
    ],
    ids=["read", "exchange", "layer", "batch-norm", "still-read", "still-exchange", "still-layer"],
)
def test_frozen_weights(
    case: Case, halo: str, overlap: bool, factors: dict[str, float], meshes: dict[str, Mesh]
) -> None:
    check(case, factors, ParallelConfig(halo=halo, overlap=overlap), meshes["gloo"])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize(("case", "halo"), [(CASE, "read"), (CASE, "layer"), (STILL, "read")])
def test_a_frozen_stage(case: Case, halo: str, recompute: str, meshes: dict[str, Mesh]) -> None:
    """The first of two stages; on four ranks two pipelines. With still statistics all weights are trained."""
    mesh = meshes["gloo"]
    if mesh.size % 2:
        pytest.skip("two stages need ranks in pairs")
    names = case.unet.graph().names[1:]
    first = next(k for k, name in enumerate(names) if name.startswith("decoder"))
    parallel = ParallelConfig(halo=halo, stages=2, balance=[first, len(names) - first], recompute=recompute)
    check(case, {} if case is STILL else ENCODER, parallel, mesh)
