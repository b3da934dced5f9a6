"""A machine's profile as plain values, as its file holds them: checked, and turned into a `Profile`.

A file has `measured` figures, of `plan --calibrate`, or those of a `datasheet` with the shares of them that are
`assumed` to be reached. So nobody takes the one for the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tiledseg.errors import ConfigError
from tiledseg.planning.cost_model.layer_work import CLASSES
from tiledseg.planning.cost_model.profile import CopyRates, Crowd, Link, Profile, Sharing
from tiledseg.planning.cost_model.rates import Point, Table
from tiledseg.units.widths import ACTIVATION_BYTES

TOP = ("name", "note", "sources", "host", "measured", "datasheet", "assumed")
HOST = ("ranks", "memory", "cores", "threads")
LINKS = ("host", "network")
EXTRAS = (
    "gradient", "update", "tensor", "reading", "opening", "first_touch", "exchange", "window", "summed", "norm", "base",
)  # fmt: skip
MEASURED = ("on", "flops", "bandwidth", "launch", "rates", "links", "sharing", "crowded", "disk", "host_store", *EXTRAS)
DATASHEET = ("flops", "bandwidth", "links", "disk", "host_store")
ASSUMED = ("flops", "bandwidth", "links", "disk", "launch", "latency", "gradient", "update", "tensor")
UNKNOWN_LINK = Link(20e-6, 10e9, 20e-6, 10e9)
_NUMBER = re.compile(r"\d+e[+-]?\d+", re.IGNORECASE)
_LEAST, _MOST = 0.0, 1e24


def profile_of(path: str, values: Any) -> Profile:
    """The profile that the file `path` holds. Raises ConfigError, in one line that names the file and the key."""
    return _Form(path).profile(values)


class _Form:
    def __init__(self, path: str) -> None:
        self.path = path

    def profile(self, values: Any) -> Profile:
        if not isinstance(values, Mapping) or not values.keys() & set(TOP):  # whose text is nobody's business
            raise ConfigError(
                f"{self.path} is no machine's profile, which has {', '.join(TOP)}; give one of --calibrate"
            )
        top = self.group(values, "", TOP)
        name, host = top.get("name"), self.group(top.get("host"), "host", HOST)
        if not isinstance(name, str) or not name:
            raise self.fault("name", name, "a word for the machine")
        if ("measured" in top) == ("datasheet" in top):
            raise ConfigError(f"{self.path} has to have either measured or datasheet figures; give one of the two")
        known = self.measured(top["measured"]) if "measured" in top else self.datasheet(top)
        if "cores" in host and known["host_store"] is not None:
            raise ConfigError(
                f"{self.path} has host.cores and a host_store, but ranks on cores compute in their host's memory; "
                "leave one of the two out"
            )
        return Profile(
            name=name,
            ranks_per_host=self.whole(host, "host.ranks"),
            memory=self.whole(host, "host.memory") if "memory" in host else None,
            cores=self.whole(host, "host.cores") if "cores" in host else None,
            threads=self.whole(host, "host.threads") if "threads" in host else 1,
            measured="measured" in top,
            **known,
        )

    def measured(self, values: Any) -> dict[str, Any]:
        group = self.group(values, "measured", MEASURED)
        own = {key: self.number(group, f"measured.{key}") for key in EXTRAS if key in group}
        if "base" in own:
            own["base"] = int(own["base"])
        links = self.group(group.get("links", {}), "measured.links", LINKS)
        sharing = self.group(group.get("sharing", {}), "measured.sharing", Sharing._fields)
        return {
            "flops": self.by_precision(group, "measured.flops"),
            "bandwidth": self.positive(group, "measured.bandwidth"),
            "launch": self.number(group, "measured.launch"),
            "tables": self.tables(group.get("rates", {})),
            "links": {name: self.link(links, name) for name in LINKS},
            "sharing": Sharing(**{key: self.positive(sharing, f"measured.sharing.{key}") for key in sharing}),
            "disk": self.rates(group, "measured.disk"),
            "host_store": self.rates(group, "measured.host_store"),
            "crowded": self.crowd(group["crowded"]) if "crowded" in group else None,
            **own,
        }

    def crowd(self, values: Any) -> Crowd:
        where = "measured.crowded"
        group = self.group(values, where, Crowd._fields)
        figures = {key: self.number(group, f"{where}.{key}") for key in Crowd._fields}
        return Crowd(**figures | {key: self.positive(group, f"{where}.{key}") for key in ("turns", "reduce_bandwidth")})

    def datasheet(self, top: Mapping[str, Any]) -> dict[str, Any]:
        sources = top.get("sources")
        if not isinstance(sources, Sequence) or isinstance(sources, str) or not sources:
            raise self.fault("sources", sources, "a list of where the datasheet's figures are from")
        sheet = self.group(top["datasheet"], "datasheet", DATASHEET)
        assumed = self.group(top.get("assumed"), "assumed", ASSUMED)
        share = {key: self.share(assumed, f"assumed.{key}") for key in ("flops", "bandwidth", "links")}
        latency = self.group(assumed.get("latency"), "assumed.latency", LINKS)
        speeds = self.group(sheet.get("links"), "datasheet.links", LINKS)
        bandwidth = share["bandwidth"] * self.positive(sheet, "datasheet.bandwidth")
        links = {}
        for name in LINKS:
            seconds = self.number(latency, f"assumed.latency.{name}")
            speed = share["links"] * self.positive(speeds, f"datasheet.links.{name}")
            links[name] = Link(seconds, speed, seconds, speed)
        return {
            "flops": {k: share["flops"] * v for k, v in self.by_precision(sheet, "datasheet.flops").items()},
            "bandwidth": bandwidth,
            "launch": self.number(assumed, "assumed.launch"),
            "links": links,
            **{key: self.number(assumed, f"assumed.{key}") / bandwidth for key in ("gradient", "update")},
            "tensor": self.number(assumed, "assumed.tensor"),
            "disk": self.rates(
                sheet, "datasheet.disk", self.share(assumed, "assumed.disk") if "disk" in sheet else 1.0
            ),
            "host_store": self.rates(sheet, "datasheet.host_store", share["links"]),
        }

    def tables(self, values: Any) -> dict[str, dict[str, Table]]:
        found: dict[str, dict[str, Table]] = {}
        for precision, classes in self.group(values, "measured.rates", ACTIVATION_BYTES).items():
            of_classes = self.group(classes, f"measured.rates.{precision}", CLASSES)
            for kind, points in of_classes.items():
                where = f"measured.rates.{precision}.{kind}"
                found.setdefault(precision, {})[kind] = Table.of(self.points(points, where))
        return found

    def points(self, values: Any, where: str) -> list[Point]:
        if not isinstance(values, list) or not values:
            raise self.fault(where, values, "a list of points")
        rows = [[_plain(value) for value in row] if isinstance(row, list) else row for row in values]
        for row in rows:
            if not isinstance(row, list) or len(row) != len(Point._fields) or not all(map(_is_positive, row)):
                raise self.fault(where, row, f"points of five positive numbers: {', '.join(Point._fields)}")
        return [Point(*map(float, row)) for row in rows]

    def rates(self, group: Mapping[str, Any], where: str, share: float = 1.0) -> CopyRates | None:
        name = where.rpartition(".")[2]
        if name not in group:
            return None
        known = self.group(group[name], where, CopyRates._fields)
        return CopyRates(*(share * self.positive(known, f"{where}.{field}") for field in CopyRates._fields))

    def link(self, links: Mapping[str, Any], name: str) -> Link:
        if name not in links:
            return UNKNOWN_LINK
        where = f"measured.links.{name}"
        group = self.group(links[name], where, Link._fields)
        return Link(*(self.positive(group, f"{where}.{field}") for field in Link._fields))

    def by_precision(self, group: Mapping[str, Any], where: str) -> dict[str, float]:
        flops = self.group(group.get("flops"), where, ACTIVATION_BYTES)
        if "fp32" in flops:  # a profile of an older version has no fp16
            flops = {"fp16": flops["fp32"], **flops}
        return {precision: self.positive(flops, f"{where}.{precision}") for precision in ACTIVATION_BYTES}

    def group(self, values: Any, where: str, known: Collection[str]) -> Mapping[str, Any]:
        if not isinstance(values, Mapping):
            raise self.fault(where or "the file", values, f"keys below it: {', '.join(known)}")
        for key in values:
            if key not in known:
                place = f"{where}." if where else ""
                raise ConfigError(f"{self.path} has the unknown key '{place}{key}'; give some of {', '.join(known)}")
        return values

    def number(self, group: Mapping[str, Any], where: str) -> float:
        value = _plain(group.get(where.rpartition(".")[2]))
        if value is None or not _is_number(value) or not _LEAST <= value <= _MOST:
            raise self.fault(where, value, f"a number from {_LEAST:g} to {_MOST:g}")
        return float(value)

    def positive(self, group: Mapping[str, Any], where: str) -> float:
        value = self.number(group, where)
        if value == 0:
            raise self.fault(where, value, "a number above 0")
        return value

    def share(self, group: Mapping[str, Any], where: str) -> float:
        value = self.positive(group, where)
        if value > 1:
            raise self.fault(where, value, "a share, from above 0 to 1")
        return value

    def whole(self, group: Mapping[str, Any], where: str) -> int:
        value = group.get(where.rpartition(".")[2])
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**60:
            raise self.fault(where, value, "a whole number from 1")
        return value

    def fault(self, where: str, value: Any, wanted: str) -> ConfigError:
        said = repr(value)
        said = said if len(said) <= 60 else f"{said[:57]}..."
        return ConfigError(f"{self.path}: {where} is {said}; give {wanted}")


def _plain(value: Any) -> Any:
    """A number that YAML takes for a word, since it has no point: 1e-5."""
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and 0 < value <= _MOST
