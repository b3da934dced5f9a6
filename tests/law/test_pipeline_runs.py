"""Pipelines through the commands' own code: one configuration, one loss line, one map, whatever the split."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import rasterio
import torch

from tests.law.test_training_steps import alone, configuration, losses, run
from tests.law.validations import check_validations
from tiledseg.architecture.presets import PRESETS
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import Config, ModelConfig, ParallelConfig, RunConfig, TilingConfig
from tiledseg.inference.mapper import checkpoint_mapper
from tiledseg.inference.predictor import Request, predict
from tiledseg.planning.run.parallelism import parallelism

pytestmark = pytest.mark.usefixtures("small_views", "without_plots")
STEPS = 6


def split(ranks: int, kind: str) -> ParallelConfig | None:
    """A way to spread a run over so many ranks; None where they are too few for it."""
    if kind == "gpipe":
        return ParallelConfig(stages=ranks, schedule="gpipe", recompute="except_last", balance="modelled")
    if kind == "folded":
        return ParallelConfig(stages=ranks, schedule="folded", balance="modelled")
    if kind == "rounds":
        return ParallelConfig(stages=ranks, micro_batches=2, recompute="always")
    if kind == "replicas" and ranks >= 4:
        return ParallelConfig(stages=2)
    if kind == "exchange" and ranks >= 4:
        return ParallelConfig(stages=2, halo="exchange", mesh=[2, 1], schedule="gpipe", idle_ranks=ranks > 4)
    if kind == "layer" and ranks >= 4:
        return ParallelConfig(stages=2, halo="layer", mesh=[2, 1], recompute=["always", "never"], idle_ranks=ranks > 4)
    if kind == "folded layer" and ranks >= 4:
        return ParallelConfig(stages=2, halo="layer", mesh=[2, 1], schedule="folded", idle_ranks=ranks > 4)
    return ParallelConfig(stages=ranks) if kind == "1f1b" else None


KINDS = ("1f1b", "gpipe", "folded", "rounds", "replicas", "exchange", "layer", "folded layer")


def few_steps(folder: Path, output: Path, optimizer: str) -> Config:
    config = configuration(folder, output, "fp64", optimizer, None)
    train = replace(config.train, epochs=STEPS, validate_every=3)
    # A policy counts the steps of the whole run: at a constant rate two halves are one run.
    return replace(config, train=train, optimizer=replace(config.optimizer, policy="constant", warmup_steps=0))


@pytest.fixture(scope="module")
def reference(meshes: dict[str, Mesh], shared: Path) -> list[dict]:
    """The metrics of the run on one rank."""
    return meshes["gloo"].on_root(lambda: run(few_steps(shared, shared / "one", "adamw"), alone()))


SIX = ("1f1b", "folded", "replicas", "folded layer")
RANKS = {"gpipe": (3,), "folded": (2, 4), "rounds": (2,)}


def marks(kind: str) -> list[pytest.MarkDecorator]:
    some = pytest.mark.ranks(*RANKS.get(kind, (2, 3, 4)))
    return [some, pytest.mark.six] if kind in SIX else [some]


@pytest.mark.mpi
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks(kind)) for kind in KINDS])
def test_steps_and_validations_are_those_of_one_rank(
    kind: str, shared: Path, reference: list[dict], meshes: dict[str, Mesh]
) -> None:
    mesh = meshes["mpi" if kind in ("1f1b", "layer") else "gloo"]
    parallel = split(mesh.size, kind)
    if parallel is None or parallel.stages == 1:
        pytest.skip(f"{kind} needs more than {mesh.size} ranks")
    config = replace(
        few_steps(shared, Path("unused"), "adamw"),
        parallel=parallel,
        run=RunConfig(output=str(shared / kind), verbosity=0),
    )
    found = run(config, mesh)
    assert losses(found) == pytest.approx(losses(reference), rel=1e-12)
    checks = [[line["val"] for line in lines if "val" in line] for lines in (found, reference)]
    for mine, theirs in zip(*checks, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
        assert mine["iou"] == pytest.approx(theirs["iou"], rel=1e-12)
    check_metrics(found, parallel)
    check_checkpoint(shared / kind, shared / "one")
    check_validations(shared / kind, shared / "one")


def check_metrics(lines: list[dict], parallel: ParallelConfig) -> None:
    for line in lines:
        if "loss" in line:
            assert len(line["stage_seconds"]) == parallel.stages
            assert all(seconds > 0 for seconds in line["stage_seconds"])
            assert 0 <= line["bubble_share"] < 1
            assert line["pipeline_bytes"] > 0 < line["pipeline_messages"]


def check_checkpoint(found: Path, expected: Path) -> None:
    """The same tensors under the same names, as if one rank had written them."""
    from safetensors.torch import load_file

    for name in ("model.safetensors", "optimizer.safetensors"):
        mine, theirs = (load_file(find_checkpoint(folder).path / name) for folder in (found, expected))
        assert mine.keys() == theirs.keys()
        for key in theirs:
            torch.testing.assert_close(mine[key], theirs[key], rtol=1e-9, atol=1e-12)


@pytest.mark.mpi(min_size=2)
@pytest.mark.ranks(3)
def test_bfloat16_is_no_less_exact_with_stages(shared: Path, meshes: dict[str, Mesh]) -> None:
    """Activations travel in the dtype in which a layer gives them: the same roundings as on one rank."""
    mesh = meshes["gloo"]
    config = few_steps(shared, shared / "bf16-one", "sgd")
    config = replace(config, train=replace(config.train, precision="bf16"))
    expected = mesh.on_root(lambda: run(config, alone()))
    parallel = ParallelConfig(stages=mesh.size, balance="modelled", recompute="always")
    split = replace(config, parallel=parallel, run=RunConfig(str(shared / "bf16-split"), 0))
    assert losses(run(split, mesh)) == pytest.approx(losses(expected), rel=1e-6)


@pytest.mark.mpi(min_size=6)
@pytest.mark.six
def test_a_preset_with_its_norm_and_the_papers_balance(shared: Path, meshes: dict[str, Mesh]) -> None:
    """Instance norm needs whole images, which are then the micro-batches: three of them a step."""
    mesh = meshes["mpi"]
    names = {what: [str(shared / f"{what}-{i}.tif") for i in range(3)] for what in ("image", "labels")}
    mesh.on_root(
        lambda: [shutil.copy(shared / f"{w}.tif", path) for w, paths in names.items() for path in paths] and None
    )
    config = few_steps(shared, shared / "preset-one", "sgd")
    config = replace(
        config,
        data=replace(config.data, images=names["image"], labels=names["labels"]),
        model=ModelConfig(name="small", base_channels=1),
        train=replace(config.train, epochs=3, images_per_step=3, validate_every=3),
        tiling=TilingConfig(grid=1),
    )
    expected = mesh.on_root(lambda: run(config, alone()))
    parallel = ParallelConfig(stages=6, halo="layer", mesh=[1, 1], balance=list(PRESETS["small"].balance))
    split = replace(config, parallel=parallel, run=RunConfig(str(shared / "preset-split"), 0))
    assert losses(run(split, mesh)) == pytest.approx(losses(expected), rel=1e-10)


@pytest.mark.mpi
@pytest.mark.six
@pytest.mark.ranks(3)
def test_a_run_goes_on_with_another_split(shared: Path, reference: list[dict], meshes: dict[str, Mesh]) -> None:
    """Half of the steps on all ranks as stages; the other half on one rank, on two stages, and on three."""
    mesh = meshes["gloo"]
    if mesh.size == 1:
        pytest.skip("one rank has no stages")
    whole = few_steps(shared, shared / "begun", "adamw")
    first = replace(whole, parallel=ParallelConfig(stages=mesh.size), train=replace(whole.train, epochs=STEPS // 2))
    assert run(first, mesh)[-1]["step"] == STEPS // 2
    for stages in {1, min(2, mesh.size), min(3, mesh.size)}:
        folder = shared / f"on-{stages}"
        mesh.on_root(lambda folder=folder: shutil.copytree(shared / "begun", folder))  # type: ignore[misc]
        spread = ParallelConfig(stages=stages, idle_ranks=stages > 1)
        onward = replace(whole, parallel=spread, run=RunConfig(str(folder), 0))
        assert losses(run(onward, mesh)) == pytest.approx(losses(reference), rel=1e-12)


@pytest.mark.mpi
@pytest.mark.six
@pytest.mark.parametrize("kind", KINDS)
def test_the_map_is_the_same(kind: str, shared: Path, reference: list[dict], meshes: dict[str, Mesh]) -> None:
    mesh = meshes["gloo"]
    parallel = split(mesh.size, kind)
    if parallel is None or parallel.stages == 1 or parallel.recompute != "never":
        pytest.skip(f"{kind} has no map of its own on {mesh.size} ranks")
    checkpoint = find_checkpoint(shared / "one")

    def mapped(name: str, spread: ParallelConfig, mesh: Mesh) -> bytes:
        output = str(shared / f"{name}.tif")
        request = Request(str(shared / "image.tif"), output, None, (4, 3), "fp64", parallelism(spread), verbosity=0)
        predict(request, checkpoint_mapper(checkpoint), 1 << 30, mesh)
        mesh.communicator.barrier()
        with rasterio.open(output) as file:
            return file.read(1).tobytes()

    expected = mesh.on_root(lambda: mapped(f"{kind}-alone", ParallelConfig(), alone()))
    assert mapped(f"{kind}-split", parallel, mesh) == expected
