"""Processes with the pretend GPU, for tests on machines without one: the fixture `pretend_gpu`. The fixture `any_gpu`
gives the real GPU where torch has one: it knows no races, and reports no waits."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.comm.launching import MPIRUN, ROOT, Done, clean_environment, oversubscribe, run_job

HERE = Path(__file__).parent


def build() -> Path:
    """Return the folder of the compiled device, named by its source and by torch's place and version; compile it where
    nobody has. Skip the test where nothing can, and where torch is built for real ones."""
    compiler = shutil.which("c++")
    if torch.backends.cuda.is_built() or compiler is None:
        pytest.skip("no C++ compiler, or a torch that is built for GPUs, whose keys the pretend one would take")
    source, torch_ = HERE / "device.cpp", Path(torch.__file__).parent
    version = hashlib.sha256(source.read_bytes() + f"{torch_} {torch.__version__}".encode()).hexdigest()[:12]
    built = ROOT / "build/pretend_gpu" / version / "pretend_device.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        folders = torch_ / "include", torch_ / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]
        flags = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", *(f"-I{folder}" for folder in folders)]
        flags += [f"-L{torch_ / 'lib'}", f"-Wl,-rpath,{torch_ / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
        half = built.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, source, *flags, "-o", half], check=True, timeout=280)
        half.rename(built)
    return built.parent


@dataclass(frozen=True)
class Ran(Done):
    """A job's end, and what it did on its GPUs, by rank; None on a real one."""

    reports: list[dict] | None

    @property
    def report(self) -> dict:
        """Return what rank 0 did on its GPU; skip the test on a real one."""
        return self.reports[0] if self.reports else pytest.skip("a real GPU reports no waits and contexts")

    def sound(self) -> "Ran":
        """Return itself, and fail the test where the job failed or had a race."""
        assert self.code == 0, f"exit status {self.code}\n{self.out[-4000:]}\n{self.err[-8000:]}"
        assert self.reports != [], "no process wrote a report"
        races = [race for report in self.reports or () for race in report["races"]]
        assert not races, "\n".join(races[:20])
        return self


@dataclass
class PretendGpu:
    """Starts processes in which torch has a pretend GPU; a real one where `built` is None."""

    built: Path | None
    folder: Path

    def run(self, words: Sequence[object], ranks: int = 1, devices: int = 1, timeout: int = 240, **more: str) -> Ran:
        """Run Python with `words` on each of `ranks`, which see so many devices; `more`: environment variables."""
        if self.built is None and torch.cuda.device_count() < devices:
            pytest.skip(f"{devices} GPUs are needed, {torch.cuda.device_count()} are there")
        reports, paths = Path(tempfile.mkdtemp(dir=self.folder)), [ROOT, os.environ.get("PYTHONPATH", "")]
        if self.built is not None:
            paths = [HERE / "start", self.built, *paths]
            more |= {"PRETEND_GPU_DEVICES": str(devices), "PRETEND_GPU_REPORTS": str(reports)}
        more |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMPI_MCA_mpi_yield_when_idle": "1"}
        launcher = [str(MPIRUN), *oversubscribe(), "-n", str(ranks)] if ranks > 1 else []
        done = run_job([*launcher, sys.executable, *map(str, words)], timeout, clean_environment(more))
        written = sorted(reports.glob("*.json"), key=lambda file: int(file.name.split("-")[0]))
        read = None if self.built is None else [json.loads(file.read_text()) for file in written]
        return Ran(**vars(done), reports=read)

    def python(self, code: str, **given: int) -> Ran:
        """Run lines of Python."""
        return self.run(["-c", code], **given)
