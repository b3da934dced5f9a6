"""What checkpoints cost a run: training of the same steps without any, with each waited for, and with them written in
the background, side by side, in turns.

    python -m benchmarks.checkpoints

A U-Net of `--channels` base channels learns a random tile of `--size` pixels on one rank; its checkpoint is written
once in `--every` steps, in their middle, so that its end falls into the round. Said are the seconds of a step, the
seconds in which the main thread stood in a save (the stall) and their share of the time, by how much the round is
longer than one without checkpoints (what the thread takes of the cores and of the memory's rate besides), the bytes of
a checkpoint, and the rate at which this disk takes them.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tiledseg.architecture.unet import UNet
from tiledseg.comm.axes import serial_axes
from tiledseg.comm.launch import detect
from tiledseg.comm.session import open_mesh
from tiledseg.config.run import Config
from tiledseg.execution.agreement import check_agreement, check_finite
from tiledseg.models.network import build_network
from tiledseg.system.writing import flush
from tiledseg.training.saving import Saver
from tiledseg.training.steps.optimizer import build_optimizer

WAYS = ("none", "waited for", "in the background")
MIB = 2**20


@dataclass(frozen=True)
class Cost:
    """Of one round: seconds of all steps and saves, and those in which the main thread stood in saves."""

    seconds: float
    stalled: float


class Way:
    """A network that learns; `run` trains it for some steps, with checkpoints in one of the `WAYS`."""

    def __init__(self, channels: int, levels: int, size: int) -> None:
        network = UNet(levels=levels, base_channels=channels, bands=4, classes=5)
        self.network = build_network(network.graph(), network.bands, seed=0).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = build_optimizer(self.network.parameters(), Config().optimizer)
        self.x_BCHW = torch.randn(1, 4, size, size).contiguous(memory_format=torch.channels_last)
        self.mesh = open_mesh(detect({}), {})
        self.bytes_written = 0

    def savers(self, folder: Path) -> dict[str, Saver]:
        """One for each way that saves, as a run has one."""
        return {name: Saver(folder, 1, serial_axes()) for name in WAYS[1:]}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.network(self.x_BCHW).square().mean().backward()
        self.optimizer.step()

    def save(self, saver: Saver, step: int, waits: bool) -> None:
        """As `Trainer` does, with its checks."""
        check_finite(self.network, self.optimizer, self.mesh, step)
        check_agreement(self.network, self.mesh, self.mesh.communicator)
        saver.save(self.network, self.optimizer, None, {"step": step}, None)
        if waits:
            saver.wait()

    def run(self, saver: Saver | None, folder: Path, steps: int, every: int, waits: bool) -> Cost:
        begun, stalled = time.perf_counter(), 0.0
        for step in range(1, steps + 1):
            self.step()
            if saver is not None and step % every == every // 2:
                asked = time.perf_counter()
                self.save(saver, step, waits)
                stalled += time.perf_counter() - asked
        seconds = time.perf_counter() - begun
        if saver is not None:
            saver.wait()
            self.bytes_written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder)
        return Cost(seconds, stalled)


def disk_rate(folder: Path, count: int) -> float:
    """Bytes a second at which this disk takes `count` bytes for good."""
    data, path = memoryview(bytearray(count)), folder / "rate"
    begun = time.perf_counter()
    with path.open("wb") as file:
        file.write(data)
    flush(path)
    rate = count / (time.perf_counter() - begun)
    path.unlink()
    return rate


def rounds(way: Way, folder: Path, steps: int, every: int, repeat: int) -> dict[str, list[Cost]]:
    """Each of the ways in turns, so that what else the machine does meets all alike."""
    found: dict[str, list[Cost]] = {name: [] for name in WAYS}
    savers: dict[str, Saver | None] = {WAYS[0]: None, **way.savers(folder)}
    way.step()  # fresh memory, and the optimizer's state
    for _ in range(repeat):
        for name in WAYS:
            found[name].append(way.run(savers[name], folder, steps, every, name == WAYS[1]))
    return found


def table(found: dict[str, list[Cost]], steps: int) -> str:
    """Markdown: medians."""
    seconds = {name: statistics.median(cost.seconds for cost in costs) for name, costs in found.items()}
    base = seconds[WAYS[0]]
    rows = [
        "| checkpoints | a step | stall | share of the time | longer than without |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, costs in found.items():
        stalled = statistics.median(cost.stalled for cost in costs)
        stall, longer = f"{stalled:.3f} s", f"{100 * (seconds[name] / base - 1):+.1f} %"
        share = f"{100 * stalled / seconds[name]:.2f} %"
        rows.append(f"| {name} | {seconds[name] / steps:.3f} s | {stall} | {share} | {longer} |")
    return "\n".join(rows)


def main() -> None:
    """Prints what a checkpoint is, the disk, and the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk that is asked about")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=flags.folder, prefix="checkpoints-") as name:
        folder, way = Path(name), Way(flags.channels, flags.levels, flags.size)
        found = rounds(way, folder / "run", flags.steps, flags.every, flags.repeat)
        size = way.bytes_written
        print(f"A checkpoint is {size / MIB:.1f} MiB; this disk takes {disk_rate(folder, size) / MIB:.0f} MiB/s.")
        print(table(found, flags.steps))


if __name__ == "__main__":
    main()
