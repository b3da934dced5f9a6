"""All that is measured of this machine, as the plain values of a profile's file."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from typing import Any

import torch

from tiledseg.architecture.unet import UNet
from tiledseg.comm.mesh import Mesh
from tiledseg.memory.disk.rates import TENSOR, store_rates
from tiledseg.planning.cost_model.layer_work import CONVOLUTIONS
from tiledseg.planning.cost_model.profile import Link
from tiledseg.training.calibration.exchanges import measure_exchanges, measure_together
from tiledseg.training.calibration.layers import Case, Timed, launch_seconds, measure_case, points, usual_cases
from tiledseg.training.calibration.links import measure_host_store, measure_link_of, measure_sharing
from tiledseg.training.calibration.movement import first_touch, measure_movement, measure_reading
from tiledseg.training.calibration.weights import measure_weights
from tiledseg.units.widths import ACTIVATION_BYTES
from tiledseg.version import VERSION

_MOVED = 8 * TENSOR  # bytes to the disk, twice, and back
SECONDS = 30.0  # of layers: what is left then is left out
VISITS = 2
TINY = Case(UNet(2, base_channels=8, classes=5), 8)


def calibrate(
    mesh: Mesh, name: str, base: int, cases: Sequence[Case] | None = None, store: str | None = None
) -> dict[str, Any]:
    """The values, with the `base` that was measured before, on every rank; layers, of `cases` (None: the usual ones),
    and the disk of the folder `store` are measured on rank 0, links on all. Collective."""
    disk = mesh.on_root(lambda: {} if store is None else {"disk": _rounded(store_rates(store, _MOVED)._asdict())})
    way = measure_host_store(mesh, _MOVED)
    if way is not None:
        disk["host_store"] = _rounded(way._asdict())
    hosts = mesh.communicator.gather_objects(mesh.host)
    ranks, one_host = hosts.count(hosts[0]), len(set(hosts)) == 1
    teams = ranks if mesh.device.type != "cpu" else max(1, len(os.sched_getaffinity(0)) // torch.get_num_threads())
    free = min(mesh.size, max(teams, 2)) if one_host else mesh.size
    together = _together(mesh, free, "host" if one_host else "network")
    if free < mesh.size:
        together["crowded"] = _crowded(mesh, free, Link(**together["links"]["host"]))
    chosen = usual_cases() if cases is None else cases
    if mesh.device.type == "cpu":  # which has no kernels of its own for fp16: minutes
        chosen = [case for case in chosen if case.precision != "fp16"]
    own = mesh.on_root(lambda: _own(mesh, name, ranks, chosen))
    if one_host and free > 1 and mesh.device.type == "cpu":  # measured of whole steps: better than of single layers
        most = 1 + (measure_together(mesh, 1, free) - 1) * (teams - 1) / (free - 1)
        own["measured"]["sharing"] = _rounded({"computing": most, "memory": most})
    return own | {"measured": own["measured"] | disk | {"base": base, "links": {}} | together}


def _together(mesh: Mesh, free: int, where: str) -> dict[str, Any]:
    """What the first `free` ranks, each with a core of its own, take for each other: none of one rank. Collective."""
    if free == 1:
        return {}
    part = mesh.communicator.split([list(range(free))]) if free < mesh.size else mesh.communicator
    link = measure_link_of(mesh, part)
    if part is not mesh.communicator:
        part.close()
    return _rounded(measure_exchanges(mesh, free, link)._asdict()) | {"links": {where: _rounded(link._asdict())}}


def _crowded(mesh: Mesh, free: int, link: Link) -> dict[str, float]:
    """The same of all ranks, which take turns on the cores that `free` of them have. Collective."""
    reduces = measure_link_of(mesh, mesh.communicator)
    known = link._replace(reduce_latency=reduces.reduce_latency, reduce_bandwidth=reduces.reduce_bandwidth)
    turns = max(1.0, measure_together(mesh, free, mesh.size) * free / mesh.size)
    reduced = {key: getattr(known, key) for key in ("reduce_latency", "reduce_bandwidth")}
    return _rounded({"turns": turns, **measure_exchanges(mesh, mesh.size, known)._asdict(), **reduced})


def _own(mesh: Mesh, name: str, ranks: int, cases: Sequence[Case]) -> dict[str, Any]:
    device = mesh.device
    torch.manual_seed(0)
    timed = _layers(cases, device)
    launch = launch_seconds(timed["fp32"])
    rates = {precision: points(found, launch) for precision, found in timed.items()}
    weights, reading = measure_weights(device), measure_reading(device, launch)
    rates["fp32"] |= measure_movement(device, launch) | {"entering": reading.entering}
    cores, sharing = measure_sharing(device)
    host: dict[str, Any] = {"ranks": ranks if cores is None else max(ranks, cores // torch.get_num_threads())}
    host["threads"] = torch.get_num_threads()
    host |= {"cores": cores} if cores else {"memory": torch.cuda.get_device_properties(device).total_memory}
    figures = {
        "bandwidth": max(row[-2] for row in rates["fp32"]["copy"]),
        "launch": launch,
        "gradient": weights.gradient if device.type == "cuda" else 0.0,  # else a part of layers' rates
        "update": weights.update,
        "tensor": weights.tensor,
        "reading": reading.value,
        "opening": reading.tile,
        "first_touch": first_touch(),
    }
    measured = {
        "on": f"{time.strftime('%Y-%m-%d')}, {platform.processor() or platform.machine()}, torch {torch.__version__}, "
        f"tiledseg {VERSION}",
        "flops": {precision: _fastest(rates.get(precision, rates["fp32"])) for precision in ACTIVATION_BYTES},
        **_rounded(figures),
        "sharing": _rounded(sharing._asdict()),
        "rates": rates,
    }
    return {"name": name, "host": host, "measured": measured}


def _layers(cases: Sequence[Case], device: torch.device) -> dict[str, list[Timed]]:
    """By precision. The tiniest ones come first: they say what a launch takes. All cases are visited more than once,
    some time apart, and of each layer the quickest visit counts: a moment in which the machine does something else
    reaches one of them."""
    tiny, found = measure_case(TINY, device), dict[int, list[Timed]]()
    begun = time.perf_counter()
    for _ in range(VISITS):
        for number, case in enumerate(cases):
            known = {cases[each].precision for each in found}
            if time.perf_counter() - begun < SECONDS or case.precision not in known:
                timed = measure_case(case, device)
                found[number] = [
                    one.or_quicker(last) for one, last in zip(timed, found.get(number, timed), strict=True)
                ]
    by_precision = {"fp32": tiny}
    for number, timed in found.items():
        by_precision.setdefault(cases[number].precision, []).extend(timed)
    return by_precision


def _fastest(rows: dict[str, list[list[float]]]) -> float:
    return max(row[3] for kind in CONVOLUTIONS for row in rows.get(kind, []))


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: float(f"{value:.4g}") for key, value in values.items()}
