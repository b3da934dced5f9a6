"""Processes with the pretend GPU, for tests on machines without one.

    def test_it(pretend_gpu: PretendGpu) -> None:
        ran = pretend_gpu.python("import torch; print(torch.ones(2, device='cuda').sum().item())")
        assert ran.sound().output == "2.0\\n"

The device is built once into build/pretend_gpu; `device.cpp`'s and torch's version name the file. The fixture
`any_gpu` gives the real GPU where torch has one: it knows no races, and reports no waits.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.comm.launching import MPIRUN, ROOT, clean_environment, oversubscribe, run_job

HERE = Path(__file__).parent


def build() -> Path:
    """Return the compiled device; compile it where nobody has. Skip the test where there is no C++ compiler, and where
    torch is built for real ones."""
    if torch.backends.cuda.is_built():
        pytest.skip("this torch is built for GPUs, whose keys the pretend one would take")
    source, (headers, libraries) = (
        HERE / "device.cpp",
        (Path(torch.__file__).parent / name for name in ("include", "lib")),
    )
    version = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    built = ROOT / "build" / "pretend_gpu" / f"pretend_device-{version}.so"
    built.parent.mkdir(parents=True, exist_ok=True)
    with open(built.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
            if compiler is None:
                pytest.skip("no C++ compiler on this machine")
            folders = (headers, headers / "torch/csrc/api/include", sysconfig.get_paths()["include"])
            flags = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-DTORCH_EXTENSION_NAME=pretend_device"]
            flags += [*(f"-I{folder}" for folder in folders), f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
            flags += ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
            half = built.with_suffix(".half")
            subprocess.run([compiler, str(source), *flags, "-o", str(half)], check=True, timeout=280)
            half.rename(built)
    return built


@dataclass
class Ran:
    """A job's end: what its ranks printed, and what they did on their GPUs, by rank."""

    status: int
    output: str
    errors: str
    reports: list[dict] = field(default_factory=list)
    real: bool = False

    @property
    def report(self) -> dict:
        """Return what rank 0 did on its GPU; skip the test on a real one."""
        if self.real:
            pytest.skip("a real GPU reports no waits and contexts")
        return self.reports[0]

    def waits(self, part: str = "") -> int:
        """Return how often the host of rank 0 waited at places with `part` in their name."""
        return sum(count for kind, where, count in self.report["waits"] if part in f"{kind} {where}")

    def sound(self) -> Ran:
        """Return itself, and fail the test where the job failed or had a race."""
        assert self.status == 0, f"exit status {self.status}\n{self.output[-4000:]}\n{self.errors[-8000:]}"
        assert self.reports or self.real, "no process wrote a report"
        races = [race for report in self.reports for race in report["races"]]
        assert not races, "\n".join(races[:20])
        return self


@dataclass
class PretendGpu:
    """Starts processes in which torch has a pretend GPU; a real one where `built` is None."""

    built: Path | None
    folder: Path
    jobs: int = 0

    def run(
        self,
        arguments: Sequence[str | Path],
        *,
        ranks: int = 1,
        devices: int = 1,
        timeout: float = 240,
        **environment: str,
    ) -> Ran:
        """Run Python with `arguments` on each of `ranks`, which see so many devices."""
        if self.built is None and torch.cuda.device_count() < devices:
            pytest.skip(f"{devices} GPUs are needed, {torch.cuda.device_count()} are there")
        self.jobs += 1
        reports = self.folder / f"reports-{self.jobs}"
        reports.mkdir()
        paths = filter(None, (str(HERE / "start"), str(ROOT), os.environ.get("PYTHONPATH")))
        ours = {"PYTHONPATH": os.pathsep.join(paths), "OMPI_MCA_mpi_yield_when_idle": "1"}
        ours["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        if self.built is not None:
            ours |= {"PRETEND_GPU": str(self.built), "PRETEND_GPU_DEVICES": str(devices)}
            ours["PRETEND_GPU_REPORTS"] = str(reports)
        environ = clean_environment({**ours, **environment})
        environ = {name: value for name, value in environ.items() if not name.startswith("PYTEST_")}
        launcher = [str(MPIRUN), *oversubscribe(), "-n", str(ranks)] if ranks > 1 else []
        done = run_job([*launcher, sys.executable, *map(str, arguments)], timeout, environ)
        written = sorted(reports.glob("*.json"), key=lambda file: int(file.name.split("-")[0]))
        return Ran(
            done.code, done.out, done.err, [json.loads(file.read_text()) for file in written], self.built is None
        )

    def python(self, code: str, **given: object) -> Ran:
        """Run lines of Python."""
        return self.run(["-c", code], **given)  # type: ignore[arg-type]
