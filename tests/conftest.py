"""Under mpirun rank 0 reports, another rank only where a test failed there; and the meshes of the running job."""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiledseg.comm.launch import detect
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.session import open_mesh

# torch asks for the name of every peer that connects. Where a name server loses a query, the C library asks again after
# five seconds; here after one, in this process and in those that tests start.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("PMI_SIZE", "1")))

# What carries messages changes no result: both do so in all tests on two ranks, six and nine, and on three and
# four in tests/comm; one rank has none to carry.
TRANSPORTS = ("gloo",) if SIZE in (1, 3, 4) else ("gloo", "mpi")


# Without it tests that draw their cases draw fewer, and of long lists of cases some are taken (CONTRIBUTING.md).
NIGHTLY = bool(os.environ.get("TILEDSEG_NIGHTLY"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under mpirun each rank collects for itself: files without the mark that is asked for are not read."""
    mark = config.option.markexpr
    if not getattr(config.option, "only_mpi", False) or not mark.isidentifier() or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    return True if f"mark.{mark}" not in text and "import marks" not in text else None


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if RANK > 0 and reporter is not None:
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115  (lives as long as the process)


# Files of few, long tests: they come first, so that the other process of a serial run has work to the end.
LONG = ("tests/fuzz", "tests/benchmarks", "tests/test_job_runs.py", "tests/crash", "tests/comm", "tests/test_site.py")
LONG += ("tests/pretend_gpu",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (not item.nodeid.startswith(LONG), item.path))
    items[:] = [item for item in items if NIGHTLY or _on_this_many(item)]


def _on_this_many(item: pytest.Item) -> bool:
    """Whether a test that other numbers of ranks show already is to run on this one."""
    mark = item.get_closest_marker("ranks")
    return mark is None or SIZE > 4 or SIZE in mark.args


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if RANK > 0 and report.failed:
        sys.stderr.write(f"rank {RANK}: {report.nodeid} failed in {report.when}\n{report.longreprtext}\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Each test draws the same, whichever files ran before it: two processes share a serial run as they have time."""
    random.seed(1)
    np.random.seed(1)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(1)


@pytest.fixture(autouse=True)
def torch_as_it_came() -> Iterator[None]:
    """A test's number of threads is its own. A training run asks for deterministic kernels alone and leaves it at that;
    torch has none for unpooling."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_deterministic_debug_mode("default")
        threads = torch.get_num_threads()
    yield
    if torch is not None:
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_pauses_between_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that tests have damaged are tried as often as any, but at once."""
    if "tiledseg.raster.mirrored_reader" in sys.modules:
        monkeypatch.setattr(sys.modules["tiledseg.raster.mirrored_reader"], "PAUSES", (0.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def meshes() -> Iterator[dict[str, Mesh]]:
    """Gloo's and MPI's mesh over the same ranks; alone, both are serial."""
    carried = os.environ.get("PRETEND_GPU_TRANSPORT", "gloo")  # nccl: by the tests' own (tests/pretend_gpu/nccl.py)
    names = {"gloo": carried if SIZE > 1 else "gloo", "mpi": "mpi"}
    opened = {name: open_mesh(detect(os.environ), os.environ, transport) for name, transport in names.items()}
    yield opened
    for mesh in opened.values():
        mesh.communicator.close()


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Small rasters and the configuration of a run, for the tests of one file."""
    from tests.crash.runs import Material

    return Material.make(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="module")
def without_plots() -> Iterator[None]:
    """Runs draw no progress.png and no page: they take longer than a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiledseg.training.run_journal.plot_progress", lambda *given: False)
        patch.setattr("tiledseg.training.run_page.write_report", lambda *given: None)
        yield


@pytest.fixture(params=TRANSPORTS)
def mesh(request: pytest.FixtureRequest, meshes: dict[str, Mesh]) -> Mesh:
    """The mesh of each transport in turn."""
    return meshes[request.param]


@pytest.fixture(scope="session")
def pretend_gpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Starts processes with a pretend GPU (tests/pretend_gpu/README.md); skips where nothing can compile it."""
    from tests.pretend_gpu.harness import PretendGpu, build

    return PretendGpu(build(), tmp_path_factory.mktemp("pretend-gpu"))


@pytest.fixture(scope="session")
def any_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Starts processes with the machine's GPU, with a pretend one where it has none."""
    import torch

    from tests.pretend_gpu.harness import PretendGpu

    if torch.cuda.is_available():
        return PretendGpu(None, tmp_path_factory.mktemp("real-gpu"))
    return request.getfixturevalue("pretend_gpu")
