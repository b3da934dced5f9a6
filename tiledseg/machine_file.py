"""Machines' profiles by name, as shipped, or from a file of `plan --calibrate`."""

from __future__ import annotations

from pathlib import Path

from tiledseg.config_yaml import read_yaml
from tiledseg.errors import ConfigError
from tiledseg.planning.cost_model.profile import Profile
from tiledseg.planning.cost_model.profile_form import profile_of
from tiledseg.planning.machine import Machine

SOME_CPU = "cpu"  # of one processor, measured: near enough to others to say which grid of a map is quick
_SHIPPED = Path(__file__).parent / "machines"


def shipped_machines() -> list[str]:
    """The names that `find_machine` knows."""
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))


def machine_of(given: str | None) -> Machine | None:
    """By the profile of that name or file, where one is given."""
    return None if given is None else Machine.known(find_machine(given))


def find_machine(given: str) -> Profile:
    """The profile of that name, or in that file. Raises ConfigError where there is neither, or the file is not one."""
    if given in shipped_machines():
        return profile_of(given, read_yaml(str(_SHIPPED / f"{given}.yaml")))
    if "/" not in given and not Path(given).exists():
        raise ConfigError(
            f"the machine '{given}' is neither one of {', '.join(shipped_machines())} nor a file; "
            "give one of them, or make a file with plan --calibrate"
        )
    return profile_of(given, read_yaml(given))
