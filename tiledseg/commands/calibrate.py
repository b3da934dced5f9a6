"""`tiledseg plan --calibrate OUT`: this machine measured, as a profile for `plan --machine`."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import yaml

from tiledseg.comm.session import run_on_mesh
from tiledseg.planning.cost_model.profile_form import profile_of
from tiledseg.system.console import answer
from tiledseg.system.freed_memory import keep_freed_memory
from tiledseg.system.outputs import check_outputs, whole
from tiledseg.system.writing import replacing

if TYPE_CHECKING:
    from tiledseg.comm.mesh import Mesh


def calibrate_to(path: str, store: str | None = None) -> int:
    """Measures this machine, alone or under any launcher, and the disk of the folder `store` where one is given, and
    writes its profile; the exit code."""
    keep_freed_memory(os.environ)

    def body(mesh: Mesh) -> None:
        from tiledseg.execution.precision import make_deterministic
        from tiledseg.training.calibration.machine import calibrate

        mesh.on_root(lambda: check_outputs([whole("--calibrate", path)]))
        make_deterministic(True)
        values = calibrate(mesh, socket.gethostname(), store=store)
        mesh.on_root(lambda: write_profile(path, values))

    return run_on_mesh(body)


def write_profile(path: str, values: dict[str, Any]) -> None:
    """Checked, and whole or not at all."""
    profile = profile_of(path, values)  # what it cannot read it does not write
    with replacing(path) as part:
        part.write_text(yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=120))
    answer(f"{path}: {profile.name}, {profile.flops['fp32'] / 1e9:.4g} Gflop/s at most in float32, measured on 1 rank")
