"""`tiledseg plan --calibrate OUT`: writes the profile of this machine, by small trainings, messages and copies."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rasterio
import torch
import yaml

from tiledseg.architecture.unet import UNet
from tiledseg.comm.mesh import ALONE, Mesh
from tiledseg.comm.point_to_point import PointToPoint, measure_link
from tiledseg.comm.session import run_on_mesh
from tiledseg.commands.options import as_config, to_yaml
from tiledseg.errors import VERSION
from tiledseg.execution.carrying import CAST_DTYPES, make_deterministic
from tiledseg.geometry.graph import Graph
from tiledseg.memory.device import api, least
from tiledseg.memory.file_store import FileStore
from tiledseg.memory.host import HostMover
from tiledseg.memory.mover import TENSOR, StoreRates, store_rates
from tiledseg.planning.walk.cost_model import Machine, Prices
from tiledseg.system.console import answer
from tiledseg.system.files import replacing
from tiledseg.system.freed_memory import give_back_freed, keep_freed_memory, resident_bytes
from tiledseg.system.outputs import check_outputs, whole
from tiledseg.training.start import start
from tiledseg.units import ACTIVATION_BYTES
from tiledseg.user_files.machine import machine_from

STEPS = 9  # steps of a training; the first one does not count
_BANDS, _CLASSES = 4, 5
_MOVED = 8 * TENSOR  # bytes written to a store (twice) and read back
_PLACE = {"crs": "EPSG:32632", "transform": rasterio.Affine(1.0, 0.0, 500_000.0, 0.0, -1.0, 5_000_000.0)}


class Case(NamedTuple):
    """A training of a U-Net with `base_channels` at the top, on a square image of `side` pixels."""

    base_channels: int
    side: int
    precision: str = "fp32"
    norm: str = "none"


@cache
def _graph(case: Case) -> Graph:
    return UNet(3, base_channels=case.base_channels, classes=_CLASSES, norm=case.norm).graph()


TINY = Case(8, 32)
CASES = (
    *(Case(8, 384), Case(8, 128), Case(16, 256), Case(16, 96), Case(32, 192), Case(32, 64), Case(64, 96)),
    *(Case(12, 192, norm="pixel"), Case(16, 160, norm="instance")),
    *(Case(20, 128, precision) for precision in ("bf16", "fp16", "fp64")),
)
# Many channels, as in networks for GPUs: with fewer, float32 uses unusual kernels, and bfloat16 is bound by memory.
GPU_CASES = (
    *(Case(64, 1024), Case(64, 512), Case(96, 768), Case(128, 512)),
    *(Case(64, 768, norm="pixel"), Case(64, 640, norm="instance")),
    *(Case(128, 1024, "bf16"), Case(128, 1024, "fp16"), Case(64, 512, "fp64")),
)
_PRODUCT = 8192  # rows and columns of a product of matrices, on a GPU


def calibrate_to(path: str, store: str | None = None) -> int:
    """Measure this machine, and the disk of the folder `store`, and write the profile; return the exit code."""
    keep_freed_memory(os.environ)

    def body(mesh: Mesh) -> None:
        mesh.on_root(lambda: check_outputs([whole("--calibrate", path)]))
        make_deterministic(True)
        values = calibrate(mesh, platform.node(), store)
        mesh.on_root(lambda: write_profile(path, values))

    return run_on_mesh(body)


def write_profile(path: str, values: dict[str, Any]) -> None:
    """Check a profile's values with `machine_from`, and write it whole or not at all."""
    machine = machine_from(path, values)
    with replacing(path) as part:
        part.write_text(yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=120))
    answer(f"{path}: {machine.name}, {machine.flops / 1e9:.4g} Gflop/s in float32, measured on 1 rank")


def calibrate(mesh: Mesh, name: str, store: str | None = None, cases: Sequence[Case] = ()) -> dict[str, Any]:
    """Measure this machine, and the disk of the folder `store`; return the values of its profile. All ranks train at
    the same time, each by itself, so the rates hold on a busy host. Collective."""
    on_cpu = mesh.device.type == "cpu"
    seconds = {TINY: min(_trained(mesh, TINY), _trained(mesh, TINY))}  # twice: the first one loads libraries
    give_back_freed()
    base = resident_bytes()
    for case in cases or (CASES if on_cpu else GPU_CASES):
        if not (on_cpu and case.precision == "fp16"):  # without kernels for it a CPU takes minutes
            seconds[case] = _trained(mesh, case)
    hosts = mesh.communicator.gather_objects(mesh.host)
    ranks, threads, cores = hosts.count(hosts[0]), torch.get_num_threads(), len(os.sched_getaffinity(0))
    host: dict[str, Any] = {"ranks": max(ranks, cores // threads) if on_cpu else ranks, "threads": threads}
    host |= {"cores": cores} if on_cpu else {"memory": api(mesh.device).mem_get_info(mesh.device)[1]}
    turns = max(1.0, ranks * threads / cores) if on_cpu else 1.0
    limits = None if on_cpu else _gpu_limits(mesh.device)
    machine = mesh.on_root(lambda: fit_all({case: value / turns for case, value in seconds.items()}, limits))
    seconds_each = {"launch": machine.launch, "reading": mesh.on_root(_reading)}
    figures = {
        "flops": _rounded(machine.rates),
        "lanes": machine.lanes,
        **_rounded({"memory_bandwidth": machine.memory_bandwidth, **seconds_each}),
        "links": _links(mesh, hosts),
        "stores": _stores(mesh, store),
    }
    kind = platform.processor() or platform.machine()
    measured = f"{time.strftime('%Y-%m-%d')}, {kind}, torch {torch.__version__}, tiledseg {VERSION}, {mesh.size} ranks"
    return {"name": name, "measured": measured, "host": host | {"base": base}, "figures": figures}


def fit_all(seconds: Mapping[Case, float], limits: tuple[float, Mapping[str, float]] | None = None) -> Machine:
    """Fit rates, `lanes`, memory bandwidth and launch to steps in fp32, then the rates of other precisions.

    `limits` of a GPU: bytes a second of a copy, and operations a second of a matrix product by precision, which no rate
    exceeds. The bandwidth is that of the copy, because a fit to float32 steps finds a tenth of it. Launch is then
    fitted to the tiny network, whose steps consist of launches.
    """
    bandwidth, products = limits or (1e11, {})
    steps = {name: {c: s for c, s in seconds.items() if c.precision == name} for name in {c.precision for c in seconds}}
    single, names = steps.pop("fp32"), ["flops", "memory_bandwidth", "launch"]
    begin = Machine(1e12, name="fitted", memory_bandwidth=bandwidth, launch=1e-5)
    if limits is not None:
        begin, names = _fit(begin, {TINY: single.pop(TINY)}, ["launch"]), ["flops"]
    fitted = (_fit(replace(begin, lanes=lanes), single, names) for lanes in (1, 4, 8, 16, 32))
    machine = min(fitted, key=lambda each: _error(each, single))
    rates = {"fp32": machine.flops} | {name: _fit(machine, own, ["flops"]).flops for name, own in steps.items()}
    rates = {name: min(rate, products.get(name, rate)) for name, rate in rates.items()}
    return replace(machine, flops=rates["fp32"], rates=rates)


def _fit(machine: Machine, seconds: Mapping[Case, float], names: Sequence[str]) -> Machine:
    """Improve the figures `names` one at a time, until no change of 1 % predicts the steps better."""
    error, factor = _error(machine, seconds), 4.0
    while factor > 1.01:
        both = factor, 1 / factor
        changed = [replace(machine, **{name: by * getattr(machine, name)}) for name in names for by in both]
        best = min(changed, key=lambda each: _error(each, seconds))
        if _error(best, seconds) < 0.999 * error:  # a smaller gain is drift of a figure that no step depends on
            error, machine = _error(best, seconds), best
        else:
            factor **= 0.5
    return machine


def _error(machine: Machine, seconds: Mapping[Case, float]) -> float:
    return sum(float(np.log(predicted(machine, case) / value)) ** 2 for case, value in seconds.items())


def predicted(machine: Machine, case: Case) -> float:
    """Predict the seconds of a step of the case by the cost model, without reading."""
    prices = Prices(_graph(case), _BANDS, ACTIVATION_BYTES[case.precision], machine)
    tile = prices.tile((case.side, case.side), case.side**2)
    return sum(prices.step(tile, 1, tile.backward))


def _trained(mesh: Mesh, case: Case) -> float:
    """Return the seconds of the fastest step of a training, without waits for data: the mean over the ranks, which
    train at the same time. Collective."""
    alone = Mesh(ALONE.launch, ALONE.communicator, mesh.device, "serial", mesh.host)
    mesh.communicator.barrier()
    with tempfile.TemporaryDirectory() as folder:
        image, labels = write_rasters(Path(folder), case.side)
        config = as_config(
            {
                "data": {"images": image, "labels": labels, "classes": _CLASSES},
                "model": {"levels": 3, "base_channels": case.base_channels, "norm": case.norm},
                "tiling": {"grid": 1},
                "train": {"epochs": STEPS, "precision": case.precision, "checkpoint_every": STEPS},
                "run": {"output": str(Path(folder) / "run"), "verbosity": 0},
            }
        )
        start(config, to_yaml(config), alone)
        lines = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line["seconds"] - line["data_seconds"] for line in lines if "seconds" in line]
    return float(np.mean(mesh.communicator.gather_objects(min(steps[1:]))))


def write_rasters(folder: Path, side: int) -> tuple[str, str]:
    """Write a georeferenced image and its labels, of five classes."""
    paths = folder / "image.tif", folder / "labels.tif"
    values_CHW = np.random.default_rng(0).integers(0, 255, (_BANDS, side, side), np.uint8)
    for path, values in zip(paths, (values_CHW, values_CHW[:1] % _CLASSES), strict=True):
        size = {"height": side, "width": side, "count": len(values), "dtype": "uint8", "photometric": "minisblack"}
        with rasterio.open(path, "w", "GTiff", tiled=True, blockxsize=256, blockysize=256, **size, **_PLACE) as file:
            file.write(values)
    return str(paths[0]), str(paths[1])


def _links(mesh: Mesh, hosts: Sequence[str]) -> dict[str, dict[str, float]]:
    """Measure messages between rank 0 and a rank of its host, and a rank of another host. Collective; no deadlock: only
    the two take part, and send in turn."""
    links = {}
    for place, same in (("host", True), ("network", False)):
        peers = [rank for rank in range(1, mesh.size) if (hosts[rank] == hosts[0]) == same]
        if peers:
            messages, two = PointToPoint(mesh.communicator), mesh.rank in (0, peers[0])
            link = measure_link(messages, peers[0] - mesh.rank, mesh.device) if two else None
            latency, per_byte = mesh.communicator.gather_objects(link)[0]
            links[place] = _rounded({"latency": latency, "bandwidth": 1 / max(per_byte, 1e-15)})
    return links


def _stores(mesh: Mesh, store: str | None) -> dict[str, dict[str, float]]:
    """Measure the disk of a folder on rank 0, and on GPUs the copies to the host's memory: those of the slowest rank
    while all copy, because ranks may share a bus. Collective."""
    disk = mesh.on_root(lambda: None if store is None else store_rates(FileStore(store, 2 * _MOVED), _MOVED))
    own = None if mesh.device.type == "cpu" else store_rates(HostMover(mesh.device, _MOVED), _MOVED)
    ways = [rates for rates in mesh.communicator.gather_objects(own) if rates is not None]
    slowest = StoreRates(*map(min, zip(*ways, strict=True))) if ways else None
    return {name: _rounded(rates._asdict()) for name, rates in (("disk", disk), ("host", slowest)) if rates}


def _reading() -> float:
    """Return the seconds of reading one value of a raster of bytes, usually from the page cache."""
    with tempfile.TemporaryDirectory() as folder, rasterio.open(write_rasters(Path(folder), 1024)[0]) as file:
        return least(torch.device("cpu"), file.read) / (_BANDS * 1024**2)


def _gpu_limits(device: torch.device) -> tuple[float, dict[str, float]]:
    """Return the bytes a second of a copy within a GPU's memory (read and write), and the operations a second of a
    square matrix product in each precision."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / least(device, lambda: target.copy_(source))
    products = {}
    for precision, dtype in {"fp32": torch.float32, "fp64": torch.float64, **CAST_DTYPES}.items():
        a = torch.randn(_PRODUCT, _PRODUCT, device=device).to(dtype)
        products[precision] = 2 * _PRODUCT**3 / least(device, partial(torch.matmul, a, a))
    return bandwidth, products


def _rounded(values: dict[str, float] | Any) -> dict[str, float]:
    return {key: float(f"{value:.4g}") for key, value in values.items()}
