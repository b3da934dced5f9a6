"""The walked peak of a training step against PyTorch's allocations, each storage followed from birth to death."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from benchmarks.planned_memory.peaks import allocator_peak
from tiledseg.architecture.network import NORMS, UPSAMPLINGS
from tiledseg.architecture.unet import UNet
from tiledseg.comm.collectives import SerialCommunicator
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import Config, TrainConfig
from tiledseg.execution.halo_modes import Part
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.precision import INPUT_DTYPES
from tiledseg.geometry.box import Box
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.memory_policy import named_policy
from tiledseg.geometry.shapes import is_legal_size
from tiledseg.geometry.sharing.mesh_shape import MeshShape
from tiledseg.geometry.tiling import make_tiling
from tiledseg.models.frozen import freeze
from tiledseg.models.network import GraphNetwork, build_modules
from tiledseg.planning.run.plan import step_cost
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.run.spread import Spread
from tiledseg.planning.walk.step_memory import training_memory
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.samples.dataset import Sample
from tiledseg.tracing.allocations import AllocationMeter
from tiledseg.training.preparing.preparation import loss_bytes_of, objective_of
from tiledseg.training.step import Stepper, StepRules
from tiledseg.units import ACTIVATION_BYTES


def measured_peak(network: GraphNetwork, context: tuple[int, int]) -> int:
    """Most bytes of one forward and backward pass, without weights and their gradients, which are there before."""
    trained = [parameter for parameter in network.train().parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    known = [t for p in trained for t in (p, p.grad)] + list(network.parameters())
    source = torch.randn(1, network.bands, *context).contiguous(memory_format=torch.channels_last)  # as runs have it
    meter = AllocationMeter(known)
    with meter:
        logits = network(source.clone())
        labels = torch.zeros(1, *logits.shape[2:], dtype=torch.long)
        loss = cross_entropy(logits, labels, reduction="sum")
        del logits, labels  # as in the trainer's steps, the loss alone holds them
        loss.backward()
    return meter.peak


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("upsampling", UPSAMPLINGS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_peak_is_that_of_a_real_step(padding: str, norm: str, upsampling: str, dropout: float) -> None:
    """Within 0.1 %."""
    unet = UNet(4, base_channels=4, padding=padding, norm=norm, upsampling=upsampling, dropout=dropout)
    context = {"same": (64, 96), "valid": (140, 156)}[padding]
    assert all(is_legal_size(unet.graph(), side) for side in context)
    memory = training_memory(unet.graph(), unet.bands, context)
    ratio = (memory.activations + memory.backward) / measured_peak(build_modules(unet, seed=0), context)
    assert 0.999 <= ratio <= 1.001


@pytest.mark.parametrize("word", ["compact", "all"])
@pytest.mark.parametrize("norm", NORMS)
def test_peak_where_some_is_computed_once_more(norm: str, word: str) -> None:
    """Within 2 %; and it is less."""
    unet, context = UNet(4, base_channels=8, norm=norm, dropout=0.1), (64, 96)
    graph = unet.graph()
    policy = named_policy(graph, unet.bands, word)
    memory, kept = (training_memory(each, unet.bands, context) for each in (graph.with_memory(policy), graph))
    found = measured_peak(build_modules(unet, seed=0).follow(policy), context)
    assert memory.activations + memory.backward == pytest.approx(found, rel=0.02)
    assert memory.activations < kept.activations
    assert memory.total < kept.total


@pytest.mark.parametrize("factors", [{"encoder*": 0, "bottom*": 0}, {"encoder0*": 0}, {"encoder*": 0, "decoder*": 0}])
@pytest.mark.parametrize("norm", NORMS)
def test_a_frozen_part_keeps_nothing(norm: str, factors: dict[str, float]) -> None:
    """Within 1 %."""
    unet, context = UNet(4, base_channels=4, norm=norm), (64, 96)
    network = freeze(build_modules(unet, seed=0), factors)
    memory, all_trained = (training_memory(graph, unet.bands, context) for graph in (network.graph, unet.graph()))
    assert memory.activations + memory.backward == pytest.approx(measured_peak(network, context), rel=0.01)
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert (memory.weights, memory.gradients, memory.optimizer) == (all_trained.weights, 8 * trained, 8 * trained)
    assert memory.total < all_trained.total


@pytest.mark.parametrize("factors", [{}, {"encoder*": 0, "bottom*": 0}])
def test_statistics_that_stand_still(factors: dict[str, float]) -> None:
    """Within 0.1 %: torch keeps the norm's input, and of its statistics nothing."""
    unet, context = UNet(4, base_channels=4, norm="batch"), (64, 96)
    network = freeze(build_modules(unet, seed=0), factors).hold_statistics()
    memory = training_memory(network.graph, unet.bands, context)
    assert memory.activations + memory.backward == pytest.approx(measured_peak(network, context), rel=0.001)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    st.builds(
        UNet,
        levels=st.integers(1, 4),
        convs_per_level=st.integers(1, 3),
        kernel=st.sampled_from([1, 3]),
        base_channels=st.sampled_from([1, 2, 8, 16]),
        padding=st.sampled_from(["same", "valid"]),
        norm=st.sampled_from(NORMS),
        upsampling=st.sampled_from(UPSAMPLINGS),
        bands=st.integers(1, 5),
        classes=st.integers(2, 9),
    ),
    st.integers(0, 6),
    st.integers(0, 6),
)
def test_peak_of_any_network_on_any_context(unet: UNet, more_rows: int, more_cols: int) -> None:
    """Within 1 %, and 2 KiB for the smallest: rounding of buffers that only batch norm has."""
    layers = unet.graph()
    legal = [n for n in range(16, 300) if is_legal_size(layers, n)]
    context = legal[more_rows], legal[more_cols]
    memory = training_memory(layers, unet.bands, context)
    assert memory.activations + memory.backward == pytest.approx(
        measured_peak(build_modules(unet, seed=0), context), rel=0.01, abs=2048
    )


@pytest.mark.parametrize("factors", [{}, {"encoder*": 0, "bottom*": 0}, {"encoder0*": 0, "decoder*": 0}])
@pytest.mark.parametrize(("precision", "most"), [("fp32", 0.001), ("fp64", 0.005), ("bf16", 0.02), ("fp16", 0.02)])
def test_the_total_is_that_of_the_trainers_own_step(precision: str, most: float, factors: dict[str, float]) -> None:
    """With weights, the optimizer's values, the sums of gradients in float64, and what kernels of float64 unfold. Where
    a part is frozen, within 1 %; in float64 up to 8 % less is allocated where nobody wants the decoder's gradients."""
    most = max(most, 0.01 if factors else 0.0)
    if precision == "fp64" and "decoder*" in factors:
        most = 0.08
    unet, side = UNet(3, base_channels=16), 96
    tiling = make_tiling((side, side), (1, 1), network_footprint(unet.graph()))
    tile, mesh = tiling.tiles[0], Mesh(SERIAL, SerialCommunicator(), torch.device("cpu"), "serial", "here")
    labels_HW, valid_HW = np.zeros((side, side), np.uint8), np.ones((side, side), bool)
    sample = Sample(0, tile, np.ones((unet.bands, side, side), INPUT_DTYPES[precision]), labels_HW, valid_HW)
    with AllocationMeter([]) as meter:
        network = freeze(build_modules(unet, seed=0), factors).train()
        run = ParallelRun.open(Spread(), network, mesh, precision)
        optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad])
        stepper = Stepper(optimizer, mesh, run.over([tiling]), run.axes, StepRules(255, 0))
        for step in range(2):  # the optimizer makes its values in the first
            meter.peak = 0
            stepper.run(step, iter([sample]), [Part(0, tile)], stop=False)
    found, lasting = meter.peak, meter.bytes
    if precision == "fp64":  # the meter sees no tensors of kernels' own
        found = lasting + allocator_peak(lambda: stepper.run(2, iter([sample]), [Part(0, tile)], stop=False))
    memory = training_memory(network.graph, unet.bands, (side, side), ACTIVATION_BYTES[precision])
    assert memory.total == pytest.approx(found, rel=most)


LOSSES = ["cross_entropy", "focal", "dice", {"cross_entropy": 1, "dice": 0.5}, "boundary", {"focal": 1, "boundary": 1}]

USUAL = [("cross_entropy", "fp64"), ("cross_entropy", "bf16")]


@pytest.mark.parametrize(("loss", "precision"), [*((loss, "fp32") for loss in LOSSES), ("dice", "fp64"), *USUAL])
def test_the_loss_that_is_asked_for(loss: str | dict[str, float], precision: str) -> None:
    """The trainer's own steps of a network whose peak is at its loss: within 3 %, which the usual loss would miss where
    another is asked for. The loss alone decides how long it needs the network's output."""
    kernel = 1 if precision == "fp64" else 3  # what is unfolded of a larger one would be the peak
    unet, side = UNet(1, convs_per_level=1, base_channels=2, classes=8, kernel=kernel), 160
    tiling = make_tiling((side, side), (1, 1), network_footprint(unet.graph()))
    tile, mesh = tiling.tiles[0], Mesh(SERIAL, SerialCommunicator(), torch.device("cpu"), "serial", "here")
    labels_HW = np.random.default_rng(0).integers(0, 8, (side, side), np.uint8)
    config = Config(train=TrainConfig(loss=loss, precision=precision))
    label_map = LabelMap.from_config(8)
    objective = objective_of(config, unet, label_map, ())
    around = Box(
        tile.core.row.expand(objective.margin, objective.margin), tile.core.col.expand(*[objective.margin] * 2)
    )
    around = around.clip(Box.of_shape((side, side)))
    pixels_CHW = np.ones((unet.bands, side, side), INPUT_DTYPES[precision])
    sample = Sample(0, tile, pixels_CHW, labels_HW, np.ones((side, side), bool), labels_HW, around)
    with AllocationMeter([]) as meter:
        network = build_modules(unet, seed=0).train()
        run = ParallelRun.open(Spread(), network, mesh, precision)
        optimizer = torch.optim.AdamW(network.parameters())
        rules = StepRules(255, 0, objective=objective)
        stepper = Stepper(optimizer, mesh, run.over([tiling]), run.axes, rules)
        for step in range(2):
            meter.peak = 0
            stepper.run(step, iter([sample]), [Part(0, tile)], stop=False)
    further = loss_bytes_of(config, unet, label_map, objective)
    sizes = unet.bands, (side, side), ACTIVATION_BYTES[precision]
    asked, usual = (training_memory(graph, *sizes).total for graph in (unet.graph().with_loss(further), unet.graph()))
    assert asked == pytest.approx(meter.peak, rel=0.03)
    if loss == "cross_entropy":
        assert asked == usual
    else:
        assert usual / meter.peak < (0.99 if loss == "focal" else 0.94), "it would be missed"


@pytest.mark.parametrize(
    ("images", "batch", "precision", "side"),
    [
        *((images, batch, "fp32", 96) for images, batch in ((1, 1), (2, 1), (3, 1), (3, 2), (3, 3))),
        *((3, batch, "bf16", 32) for batch in (1, 3)),
    ],
)
def test_images_that_go_together_need_what_the_plan_says(images: int, batch: int, precision: str, side: int) -> None:
    """A batch norm over whole steps: every image's activations are held until the one backward pass, and for every
    batch the copies of weights that autocast makes.

    Measured 1.00, 1.10 and 1.14 of the peak one by one, 1.13 and 1.09 in batches: their backward passes do not all need
    most at once.
    """
    unet = UNet(3, base_channels=8 if precision == "fp32" else 48, norm="batch")
    tiling = make_tiling((side, side), (1, 1), network_footprint(unet.graph()))
    tile, mesh = tiling.tiles[0], Mesh(SERIAL, SerialCommunicator(), torch.device("cpu"), "serial", "here")
    labels_HW, valid_HW = np.zeros((side, side), np.uint8), np.ones((side, side), bool)
    samples = [Sample(i, tile, np.ones((unet.bands, side, side), "float32"), labels_HW, valid_HW) for i in range(3)]
    spread = Spread("layer", MeshShape(1, 1, 1), together=images > 1)
    with AllocationMeter([]) as meter:
        network = build_modules(unet, seed=0).train()
        run = ParallelRun.open(spread, network, mesh, precision)
        optimizer = torch.optim.AdamW(network.parameters())
        stepper = Stepper(optimizer, mesh, run.over([tiling] * 3, batch), run.axes, StepRules(255, 0))
        for step in range(2):
            meter.peak = 0
            parts = [Part(sample.image, tile) for sample in samples[:images]]
            stepper.run(step, iter(samples), parts, stop=False)
    question = RunQuestion(unet, (Extent((side, side)),), 1, 1 << 40, precision=precision, images_per_step=images)
    planned = step_cost(question, spread, spread.mesh, [tiling], batch).memory
    assert 0.97 <= planned / meter.peak <= 1.15


def test_totals_and_states() -> None:
    unet = UNet(3, base_channels=8)
    parameters = sum(p.numel() for p in build_modules(unet).parameters())
    single = training_memory(unet.graph(), 4, (64, 64), 4)
    assert (single.weights, single.gradients, single.optimizer) == (4 * parameters, 8 * parameters, 8 * parameters)
    assert single.total == 20 * parameters + single.activations + single.backward
    double = training_memory(unet.graph(), 4, (64, 64), 8)
    assert double.gradients == 8 * parameters
    half = training_memory(unet.graph(), 4, (64, 64), 2)
    assert (half.weights, half.gradients) == (6 * parameters, 8 * parameters)
    assert half.activations < single.activations < double.activations
