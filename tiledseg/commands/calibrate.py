"""`tiledseg plan --calibrate OUT`: measure this machine, and write its profile for `plan --machine`.

The figures come from trainings of small networks, to whose steps they are fitted, from messages, and from copies.
"""

from __future__ import annotations

import json
import math
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rasterio
import torch
import yaml

from tiledseg.architecture.unet import UNet
from tiledseg.comm.collectives import SerialCommunicator
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.point_to_point import measure_link
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

STEPS = 9  # of a training; the first one does not count
_BANDS, _CLASSES = 4, 5
_MOVED = 8 * TENSOR  # bytes to a store, twice, and back
_ON_A_MAP = rasterio.Affine(1.0, 0.0, 500_000.0, 0.0, -1.0, 5_000_000.0)


class Case(NamedTuple):
    """A training: of a U-Net with so many channels at the top, on a square image."""

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
# Of many channels, as networks on GPUs have: with fewer, float32 runs by kernels that nobody trains with, and steps in
# bfloat16 take their time for all but operations.
GPU_CASES = (
    *(Case(64, 1024), Case(64, 512), Case(96, 768), Case(128, 512)),
    *(Case(64, 768, norm="pixel"), Case(64, 640, norm="instance")),
    *(Case(128, 1024, "bf16"), Case(128, 1024, "fp16"), Case(64, 512, "fp64")),
)
_PRODUCT = 8192  # rows and columns of a product of matrices, on a GPU


def calibrate_to(path: str, store: str | None = None) -> int:
    """Measure this machine, and the disk of the folder `store`, and write its profile. The exit code."""
    keep_freed_memory(os.environ)

    def body(mesh: Mesh) -> None:
        mesh.on_root(lambda: check_outputs([whole("--calibrate", path)]))
        make_deterministic(True)
        values = calibrate(mesh, socket.gethostname(), store)
        mesh.on_root(lambda: write_profile(path, values))

    return run_on_mesh(body)


def write_profile(path: str, values: dict[str, Any]) -> None:
    """Write a profile whole or not at all. Values that `machine_from` refuses are not written."""
    machine = machine_from(path, values)
    with replacing(path) as part:
        part.write_text(yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=120))
    answer(f"{path}: {machine.name}, {machine.flops / 1e9:.4g} Gflop/s in float32, measured on 1 rank")


def calibrate(mesh: Mesh, name: str, store: str | None = None, cases: Sequence[Case] = ()) -> dict[str, Any]:
    """Measure this machine, and the disk of the folder `store`: a profile's values, those of rank 0. All ranks train at
    the same time, each by itself, so that the rates hold where the others of the host compute. Collective."""
    on_cpu = mesh.device.type == "cpu"
    seconds = {TINY: min(_trained(mesh, TINY), _trained(mesh, TINY))}  # twice: the first one loads libraries
    give_back_freed()
    base = resident_bytes()
    for case in cases or (CASES if on_cpu else GPU_CASES):
        if not (on_cpu and case.precision == "fp16"):  # a CPU has no kernels of its own for it: minutes
            seconds[case] = _trained(mesh, case)
    hosts = mesh.communicator.gather_objects(mesh.host)
    ranks, threads, cores = hosts.count(hosts[0]), torch.get_num_threads(), len(os.sched_getaffinity(0))
    host: dict[str, Any] = {"ranks": max(ranks, cores // threads) if on_cpu else ranks, "threads": threads}
    host |= {"cores": cores} if on_cpu else {"memory": api(mesh.device).mem_get_info(mesh.device)[1]}
    turns = max(1.0, ranks * threads / cores) if on_cpu else 1.0
    limits = None if on_cpu else _gpu_limits(mesh.device)
    machine = mesh.on_root(lambda: fit_all({case: value / turns for case, value in seconds.items()}, limits))
    figures = {
        "flops": _rounded(machine.rates),
        "lanes": machine.lanes,
        **_rounded({"memory_bandwidth": machine.memory_bandwidth, "launch": machine.launch}),
        "links": _links(mesh, hosts),
        "stores": _stores(mesh, store),
        **mesh.on_root(lambda: _rounded({"reading": _reading()})),
    }
    words = time.strftime("%Y-%m-%d"), platform.processor() or platform.machine(), f"torch {torch.__version__}"
    measured = ", ".join((*words, f"tiledseg {VERSION}", f"{mesh.size} ranks"))
    return {"name": name, "measured": measured, "host": host | {"base": base}, "figures": figures}


class GpuLimits(NamedTuple):
    """The rates of a GPU in a copy, bytes a second, and in a product of matrices, operations a second by precision."""

    bandwidth: float
    products: dict[str, float]


def fit_all(seconds: dict[Case, float], limits: GpuLimits | None = None) -> Machine:
    """Fit rates, `lanes`, memory bandwidth and launch to steps in fp32, then the rates of other precisions.

    On a GPU the bandwidth is that of a copy, and launch is fitted to the tiny network, whose kernels do nothing
    else: a fit of all to steps in float32 finds a tenth. No rate exceeds that of a product.
    """
    single = {case: value for case, value in seconds.items() if case.precision == "fp32"}
    begin = Machine(1e12, name="fitted", memory_bandwidth=1e11, launch=1e-5)
    names = ["flops", "memory_bandwidth", "launch"]
    if limits is not None:
        begin = _fit(replace(begin, memory_bandwidth=limits.bandwidth), {TINY: single.pop(TINY)}, ("launch",))
        names = ["flops"]
    fitted = (_fit(replace(begin, lanes=lanes), single, names) for lanes in (1, 4, 8, 16, 32))
    machine = min(fitted, key=lambda each: _error(each, single))
    rates = {"fp32": machine.flops}
    for precision in {case.precision for case in seconds} - {"fp32"}:
        own = {case: value for case, value in seconds.items() if case.precision == precision}
        rates[precision] = _fit(machine, own, ("flops",)).flops
    if limits is not None:
        rates = {precision: min(rate, limits.products[precision]) for precision, rate in rates.items()}
    return replace(machine, flops=rates["fp32"], rates=rates)


def _fit(machine: Machine, seconds: dict[Case, float], names: Sequence[str]) -> Machine:
    """Change the figures of those names, one at a time, until no change of 1 % predicts the steps better."""
    error, step = _error(machine, seconds), math.log(4)
    while step > 0.01:
        factors = math.exp(step), math.exp(-step)
        changed = [replace(machine, **{name: by * getattr(machine, name)}) for name in names for by in factors]
        best = min(changed, key=lambda each: _error(each, seconds))
        if _error(best, seconds) < 0.999 * error:  # less is drift of a figure on which no step depends
            error, machine = _error(best, seconds), best
        else:
            step /= 2
    return machine


def _error(machine: Machine, seconds: dict[Case, float]) -> float:
    return sum(math.log(predicted(machine, case) / value) ** 2 for case, value in seconds.items())


def predicted(machine: Machine, case: Case) -> float:
    """Predict the seconds of a step of the case by the cost model, where a free core reads."""
    prices = Prices(_graph(case), _BANDS, ACTIVATION_BYTES[case.precision], machine)
    tile = prices.tile((case.side, case.side), case.side**2)
    return prices.step(tile, 1, tile.backward).seconds


def _trained(mesh: Mesh, case: Case) -> float:
    """Return the seconds of the quickest step of a training, without waiting for data: the mean over the ranks, which
    train at the same time. Collective."""
    alone = replace(mesh, launch=SERIAL, communicator=SerialCommunicator(), transport="serial", watch=None)
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
    return statistics.mean(mesh.communicator.gather_objects(min(steps[1:])))


def write_rasters(folder: Path, side: int) -> tuple[str, str]:
    """Write an image and its labels, of five classes, on a map."""
    paths = folder / "image.tif", folder / "labels.tif"
    values_CHW = np.random.default_rng(0).integers(0, 255, (_BANDS, side, side), np.uint8)
    for path, values in zip(paths, (values_CHW, values_CHW[:1] % _CLASSES), strict=True):
        layout = {"tiled": True, "blockxsize": 256, "blockysize": 256, "crs": "EPSG:32632", "transform": _ON_A_MAP}
        size = {"height": side, "width": side, "count": len(values), "dtype": "uint8"}
        with rasterio.open(path, "w", driver="GTiff", photometric="minisblack", **layout, **size) as file:
            file.write(values)
    return str(paths[0]), str(paths[1])


def _links(mesh: Mesh, hosts: Sequence[str]) -> dict[str, dict[str, float]]:
    """Measure messages between rank 0 and one rank of its host, and one of another host. Collective: no third rank
    takes part, and the two speak in turn, so it cannot deadlock."""
    links = {}
    for place, same in (("host", True), ("network", False)):
        peer = next((rank for rank, host in enumerate(hosts) if rank and (host == hosts[0]) == same), None)
        if peer is None:
            continue
        messages, two = mesh.communicator.point_to_point(), mesh.rank in (0, peer)
        link = measure_link(messages, peer - mesh.rank, mesh.device) if two else None
        latency, per_byte = mesh.communicator.gather_objects(link)[0]
        links[place] = _rounded({"latency": latency, "bandwidth": 1 / max(per_byte, 1e-15)})
    return links


def _stores(mesh: Mesh, store: str | None) -> dict[str, dict[str, float]]:
    """Measure the disk of a folder on rank 0, and on GPUs the way to the host's memory: of the slowest rank, while all
    send, which may share what lies between. Collective."""
    disk = mesh.on_root(lambda: None if store is None else store_rates(FileStore(store, 2 * _MOVED), _MOVED))
    own = None if mesh.device.type == "cpu" else store_rates(HostMover(mesh.device, _MOVED), _MOVED)
    ways = [rates for rates in mesh.communicator.gather_objects(own) if rates is not None]
    slowest = StoreRates(*map(min, zip(*ways, strict=True))) if ways else None
    return {name: _rounded(rates._asdict()) for name, rates in (("disk", disk), ("host", slowest)) if rates}


def _reading() -> float:
    """Return the seconds of reading a value of a raster of bytes, most likely from the page cache."""
    side = 1024
    with tempfile.TemporaryDirectory() as folder, rasterio.open(write_rasters(Path(folder), side)[0]) as file:
        return least(torch.device("cpu"), file.read) / (_BANDS * side**2)


def _gpu_limits(device: torch.device) -> GpuLimits:
    """Measure a copy within a GPU's memory, read and written, and a square product in each precision."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / least(device, lambda: target.copy_(source))
    products = {}
    for precision, dtype in {"fp32": torch.float32, "fp64": torch.float64, **CAST_DTYPES}.items():
        a = torch.randn(_PRODUCT, _PRODUCT, device=device).to(dtype)
        products[precision] = 2 * _PRODUCT**3 / least(device, partial(torch.matmul, a, a))
    return GpuLimits(bandwidth, products)


def _rounded(values: dict[str, float] | Any) -> dict[str, float]:
    return {key: float(f"{value:.4g}") for key, value in values.items()}
