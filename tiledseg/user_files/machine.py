"""Profiles of machines: shipped files, by name, and files of `plan --calibrate`.

    name: A100
    host: {ranks: 8, memory: 85899345920}
    figures:
      flops: {fp32: 11.7e+12, bf16: 187.0e+12}
      memory_bandwidth: 1.6e+12
      launch: 8.0e-6
      links: {host: {latency: 12.0e-6, bandwidth: 210.0e+9}}

`measured`: date and place of the measurement; without it the figures come from datasheets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiledseg.config.checks import Range, check_fields, shown
from tiledseg.errors import ConfigError
from tiledseg.planning.walk.cost_model import CopyRates, Link, Machine
from tiledseg.units import ACTIVATION_BYTES
from tiledseg.user_files.yaml_text import read_yaml

SOME_CPU = "cpu"  # the measured profile of one processor: close enough to others to choose the grid of a map
TOP = ("name", "note", "sources", "measured", "host", "figures")
FACTS = ("ranks", "memory", "cores", "threads", "base")
FIGURES = ("flops", "lanes", "memory_bandwidth", "launch", "links", "stores", "reading")
_UNUSED = ("first_touch",)  # in profiles of older versions
_OLD = ("datasheet", "assumed")
_NAMES = {"links": ("host", "network"), "stores": ("disk", "host")}
_COUNT, _RATE, _SECONDS = Range(1, 2**60), Range(0.0, 1e24, above=True), Range(0.0, 1e24)
_UNKNOWN_LINK = Link(20e-6, 10e9)
_BY_DEVICE = {"V100": "summit", "A100-40GB": "perlmutter", "MI250X": "frontier"}
_SHIPPED = Path(__file__).parent / "machines"
_NUMBER = re.compile(r"\d+e[+-]?\d+", re.IGNORECASE)  # a number without a point, which YAML reads as text


def shipped_machines() -> list[str]:
    """Return the names of the shipped profiles; `find_machine` knows the names of their GPUs too."""
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))


def machine_of(word: str | None) -> Machine | None:
    """Return the machine of that name or file; None for None."""
    return None if word is None else find_machine(word)


def find_machine(word: str) -> Machine:
    """Return the machine of a name or of a file. Raises ConfigError for neither, and for a file that is no profile."""
    name, shipped = _BY_DEVICE.get(word.upper(), word.lower()), shipped_machines()
    if name in shipped:
        return machine_from(name, read_yaml(str(_SHIPPED / f"{name}.yaml")))
    if "/" not in word and not Path(word).exists():
        names = sorted({*shipped, *map(str.lower, _BY_DEVICE)})
        raise ConfigError(
            f"the machine '{word}' is neither one of {', '.join(names)} nor a file; "
            "give one of them, or make a file with plan --calibrate"
        )
    return machine_from(word, read_yaml(word))


def machine_from(path: str, values: Any) -> Machine:
    """Return the machine of the `values` of the file `path`. Raises ConfigError, naming file and key."""
    if not isinstance(values, Mapping) or not values.keys() & {*TOP, *_OLD}:  # do not print an unrelated file
        raise ConfigError(f"{path} is no machine's profile, which has {', '.join(TOP)}; give one of --calibrate")
    if values.keys() & {*_OLD} or isinstance(values.get("measured"), Mapping):
        raise ConfigError(
            f"{path} is a profile of an older version, with other figures; run plan --calibrate again, or give "
            f"figures: {', '.join(FIGURES)}"
        )
    check_fields(path, values, TOP)
    if not isinstance(values.get("name"), str) or not values["name"]:
        raise ConfigError(f"{path}: name is '{shown(values.get('name'))}'; give a word for the machine")
    host = check_fields(f"{path}: host", values.get("host"), FACTS)
    figures = check_fields(f"{path}: figures", values.get("figures"), (*FIGURES, *_UNUSED))
    flops = check_fields(f"{path}: figures.flops", figures.get("flops"), ACTIVATION_BYTES)
    rates = {precision: _number(path, flops, f"figures.flops.{precision}", _RATE) for precision in {"fp32", *flops}}
    links = {name: Link(*pair) for name, pair in _pairs(path, figures, "links", Link._fields).items()}
    stores = {name: CopyRates(*pair) for name, pair in _pairs(path, figures, "stores", CopyRates._fields).items()}
    near = links.get("host", _UNKNOWN_LINK)
    if "cores" in host and "host" in stores:
        raise ConfigError(
            f"{path} has host.cores and figures.stores.host, but ranks on cores already use their host's memory; "
            "leave one of the two out"
        )
    counts = {
        name: _number(path, {"threads": 1} | host, f"host.{name}", _COUNT) for name in {"ranks", "threads", *host}
    }
    return Machine(
        flops=rates["fp32"],
        bandwidth=near.bandwidth,
        latency=near.latency,
        name=values["name"],
        measured="measured" in values,
        rates=rates,
        lanes=_number(path, {"lanes": 1} | figures, "figures.lanes", _COUNT),
        memory_bandwidth=_number(path, figures, "figures.memory_bandwidth", _RATE),
        launch=_number(path, figures, "figures.launch", _SECONDS),
        network=links.get("network", _UNKNOWN_LINK),
        disk=stores.get("disk"),
        host_store=stores.get("host"),
        reading=_number(path, {"reading": 0.0} | figures, "figures.reading", _SECONDS),
        ranks_per_host=counts["ranks"],
        memory=counts.get("memory"),
        cores=counts.get("cores"),
        threads=counts["threads"],
        base=counts.get("base", 0),
    )


def _pairs(path: str, figures: Mapping[str, Any], kind: str, fields: Sequence[str]) -> dict[str, list[float]]:
    """Return the two numbers of each link, or of each store."""
    groups = check_fields(f"{path}: figures.{kind}", figures.get(kind, {}), _NAMES[kind])
    inner = {name: check_fields(f"{path}: figures.{kind}.{name}", group, fields) for name, group in groups.items()}
    return {
        name: [_number(path, inner[name], f"figures.{kind}.{name}.{key}", _RATE) for key in fields] for name in inner
    }


def _number(path: str, group: Mapping[str, Any], where: str, allowed: Range) -> Any:
    value: Any = group.get(where.rpartition(".")[2])
    value = float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
    allowed.check(f"{path}: {where}", value)
    return value if allowed.whole else float(value)
