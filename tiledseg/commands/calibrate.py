"""`tiledseg plan --calibrate OUT`: this machine measured, as a profile for `plan --machine`."""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tiledseg.comm.session import run_on_mesh
from tiledseg.planning.cost_model.profile_form import profile_of
from tiledseg.system.console import answer
from tiledseg.system.freed_memory import give_back_freed, keep_freed_memory, resident_bytes
from tiledseg.system.outputs import check_outputs, whole
from tiledseg.system.writing import replacing

if TYPE_CHECKING:
    from tiledseg.comm.mesh import Mesh

_SIDE = 64  # pixels of an image that is next to nothing


def calibrate_to(path: str, store: str | None = None) -> int:
    """Measures this machine, alone or under any launcher, and the disk of the folder `store` where one is given, and
    writes its profile; the exit code."""
    keep_freed_memory(os.environ)

    def body(mesh: Mesh) -> None:
        from tiledseg.execution.precision import make_deterministic
        from tiledseg.training.calibration.machine import calibrate

        mesh.on_root(lambda: check_outputs([whole("--calibrate", path)]))
        make_deterministic(True)
        base = mesh.on_root(lambda: base_of_training(mesh))
        values = calibrate(mesh, socket.gethostname(), base, store=store)
        mesh.on_root(lambda: write_profile(path, values))

    return run_on_mesh(body)


def base_of_training(mesh: Mesh) -> int:
    """Bytes of the host's memory that this process holds once it has trained on next to nothing: all that a run loads,
    the drawing of its progress included. Twice, for a second picture leaves more than the first, and further ones no
    more. Freed memory is given back first: the heap keeps more or less of it by chance."""
    from tiledseg.comm.launch import SERIAL
    from tiledseg.comm.transports.collectives import SerialCommunicator
    from tiledseg.commands.config_file import as_config, to_yaml
    from tiledseg.training.calibration.movement import write_rasters
    from tiledseg.training.start import start

    alone = replace(mesh, launch=SERIAL, communicator=SerialCommunicator(), transport="serial", watch=None)
    with tempfile.TemporaryDirectory() as folder:
        image, labels = write_rasters(Path(folder), _SIDE)
        for run in ("first", "second"):
            config = as_config(
                {
                    "data": {"images": image, "labels": labels, "classes": 5},
                    "model": {"levels": 2, "base_channels": 8},
                    "train": {"epochs": 2},
                    "run": {"output": str(Path(folder) / run), "verbosity": 0},
                }
            )
            start(config, to_yaml(config), alone)
    give_back_freed()
    return resident_bytes()


def write_profile(path: str, values: dict[str, Any]) -> None:
    """Checked, and whole or not at all."""
    profile = profile_of(path, values)  # what it cannot read it does not write
    with replacing(path) as part:
        part.write_text(yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=120))
    answer(f"{path}: {profile.name}, {profile.flops['fp32'] / 1e9:.4g} Gflop/s at most in float32, measured on 1 rank")
