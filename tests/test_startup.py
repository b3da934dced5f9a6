"""How little a start loads: each library named here once took a rank, or a login node, a part of a second or more."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.launching import ROOT, clean_environment
from tests.crash.runs import Material

# A run that ends with its first optimizer step. torch must not be imported before the mesh.
FIRST_STEP = """
from tiledseg import train
run_on_mesh = train.run_on_mesh
def until_first_step(body, *settings):
    def first(mesh):
        from tiledseg.training.step import Stepper
        step = Stepper.run
        Stepper.run = lambda *arguments: (step(*arguments), sys.exit(0))
        return body(mesh)
    return run_on_mesh(first, *settings)
train.run_on_mesh = until_first_step
sys.exit(train.main())
"""
HEAVY = {"torch", "numpy", "rasterio", "h5py", "rich", "matplotlib", "mpi4py"}
NOT_FOR_A_STEP = {
    "torch._dynamo",
    "torch._inductor",
    "torch.utils.tensorboard",
    "sympy",
    "matplotlib",
    "tensorboard",
    "mpi4py.MPI",
    "tiledseg.comm.watch",
    "tiledseg.execution.block_passes",
    "tiledseg.execution.pipeline_passes",
    "tiledseg.memory.offload",
    "tiledseg.models.rebuild",
    "tiledseg.planning.walk.choice",
    "tiledseg.planning.walk.segment_memory",
    "tiledseg.raster.labels.polygons",
    "tiledseg.reporting.page",
    "tiledseg.spatial.network",
}


def loaded_by(*words: str) -> set[str]:
    """The modules that a Python process has loaded in the end."""
    told = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
    done = subprocess.run(
        [sys.executable, "-c", told + words[0], *words[1:]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_importing_the_package_loads_nothing_else() -> None:
    assert {name for name in loaded_by("import tiledseg") if name.startswith("tiledseg.")} == set()


@pytest.mark.parametrize("command", ["plan", "train", "predict", "evaluate", "export", "doctor"])
def test_help_loads_no_library(command: str) -> None:
    found = loaded_by(f"import sys; from tiledseg.cli import main; sys.exit(main(['{command}', '--help']))")
    assert {f"tiledseg.{command}", "tiledseg.comm.launch"} <= found
    assert not HEAVY & found
    assert not {"tiledseg.architecture", "tiledseg.inference", "tiledseg.planning.run", "tiledseg.training"} & found
    assert {name for name in found if "tiledseg.planning." in name} <= {
        f"tiledseg.planning.answer{end}" for end in ("", ".text")
    }


def test_the_first_step_is_reached_without_a_compiler(tmp_path: Path) -> None:
    """`torch._dynamo` with `sympy`, the half of a rank's start, came with any optimizer of torch's; drawing and events
    belong to rank 0, after the step."""
    material = Material.make(tmp_path)
    found = loaded_by(FIRST_STEP, *material.train_command(tmp_path / "run")[1:], "--optimizer.name", "sgd")
    assert {"torch.optim", "tiledseg.training.step"} <= found
    assert not NOT_FOR_A_STEP & found
