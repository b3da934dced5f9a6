"""Machines' profiles by name, as shipped, or from a file of `plan --calibrate`."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from tiledseg.errors import ConfigError
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.profile import Profile
from tiledseg.user_files.yaml_text import read_yaml

SOME_CPU = "cpu"  # of one processor, measured: near enough to others to say which grid of a map is quick
_BY_DEVICE = {"V100": "summit", "A100": "a100", "H100": "h100", "H200": "h200", "MI250X": "frontier"}
_SHIPPED = Path(__file__).parent / "machines"


def shipped_machines() -> list[str]:
    """Return the names of the files that are shipped; `find_machine` knows the names of their GPUs too."""
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))


def machine_of(given: str | None) -> Machine | None:
    """By the profile of that name or file, where one is given."""
    return None if given is None else Machine.known(find_machine(given))


def machine_here(device: str | None, ranks: int) -> Machine:
    """This very machine, as far as profiles know it: of the GPU of that name; without one that of `SOME_CPU`, with the
    cores that are here, shared by so many `ranks`. Raises ConfigError for a GPU that no profile is of."""
    if device is None:
        cores = len(os.sched_getaffinity(0))
        return Machine.known(replace(find_machine(SOME_CPU), ranks_per_host=ranks, cores=cores))
    known = [name for word, name in _BY_DEVICE.items() if word in re.split(r"[^0-9A-Za-z]+", device)]
    if not known:
        raise ConfigError(
            f"no profile is of the device '{device}', so parallel.auto can predict nothing; make one with plan "
            "--calibrate and give it as parallel.machine"
        )
    return Machine.known(find_machine(known[0]))


def find_machine(given: str) -> Profile:
    """The profile of that name, or in that file. Raises ConfigError where there is neither, or the file is not one."""
    from tiledseg.planning.cost_model.profile_form import profile_of

    name, shipped = _BY_DEVICE.get(given.upper(), given.lower()), shipped_machines()
    if name in shipped:
        return profile_of(name, read_yaml(str(_SHIPPED / f"{name}.yaml")))
    if "/" not in given and not Path(given).exists():
        names = sorted({*shipped, *map(str.lower, _BY_DEVICE)})
        raise ConfigError(
            f"the machine '{given}' is neither one of {', '.join(names)} nor a file; "
            "give one of them, or make a file with plan --calibrate"
        )
    return profile_of(given, read_yaml(given))
