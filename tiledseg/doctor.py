"""`tiledseg doctor`: shows each rank's host and device, and measures all-reduces, under any launcher.

`tiledseg doctor --rehearse -n 1200 --config run.yaml`, on one process: finds faults of a job of 1200 ranks.
"""

from __future__ import annotations

from tiledseg.commands.entry import enter

if __name__ == "__main__":
    enter("tiledseg.doctor")

import json
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tiledseg.comm.session import run_on_mesh
from tiledseg.commands.parser import Parser, add_format_option, command
from tiledseg.errors import ConfigError
from tiledseg.planning.answer.text import columns, rehearsal_words, wrapped
from tiledseg.system.console import answer, counted

if TYPE_CHECKING:
    from tiledseg.comm.mesh import Mesh


@command
def main(words: Sequence[str]) -> int:
    """Print the diagnosis on rank 0."""
    parser = Parser(
        "tiledseg doctor",
        "--rehearse -n 4 --config runs/run/config.yaml",
        description="Show the ranks of a job and measure all-reduces.",
    )
    add_format_option(parser)
    parser.add_argument("--transport", default="auto", help="auto, nccl, xccl, gloo or mpi (default auto)")
    parser.add_argument("--rehearse", action="store_true", help="walk a run's set-up (--config, keys) without ranks")
    parser.add_argument("-n", dest="ranks", type=int, default=1, help="ranks of the rehearsal")
    parser.add_argument("--gpu-memory", help="memory of a rehearsed rank (default: of parallel.machine, else 16GiB)")
    parser.add_argument(
        "--gpus-per-node", type=int, help="GPUs of a rehearsed node (default: parallel.machine's, else 6)"
    )
    parser.add_argument("--planned", metavar="NETWORK", default="", help="network of the plan: warns of another one")
    arguments, rest = parser.parse_known_args(words)
    if arguments.rehearse:
        return _rehearse(arguments, rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")

    def work(mesh: Mesh) -> None:
        from tiledseg.comm.diagnosis import diagnose

        diagnosis = diagnose(mesh, sizes=(8, 2**16, 2**20, 2**24, 2**26))
        if mesh.is_root:
            answer(json.dumps(diagnosis, indent=2) if arguments.format == "json" else _table(diagnosis))

    return run_on_mesh(work, arguments.transport)


def _rehearse(arguments: Namespace, rest: Sequence[str]) -> int:
    """Rehearse a job; return 1 if it would fail on its ranks, else 0. Raises ConfigError for wrong settings."""
    from tiledseg.commands.options import parse_config
    from tiledseg.planning.walk.cost_model import Machine
    from tiledseg.raster.labels.classes import read_classes
    from tiledseg.training.preparation import Preparation
    from tiledseg.training.rehearsal import rehearse
    from tiledseg.units import parse_bytes
    from tiledseg.user_files.machine import machine_of

    for name, value in (("-n", arguments.ranks), ("--gpus-per-node", arguments.gpus_per_node)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; give at least 1")
    config = parse_config(rest, "tiledseg doctor --rehearse", "Walks the set-up of a run without its ranks.")
    config.data.classes = read_classes(config.data.classes)
    machine = machine_of(config.parallel.machine) or Machine()
    memory = parse_bytes(arguments.gpu_memory) if arguments.gpu_memory else machine.memory or 16 * 2**30
    preparation = Preparation(config, int(0.9 * memory), arguments.ranks)  # a tenth is left to the runtime
    per_node = arguments.gpus_per_node or machine.ranks_per_host
    figures = rehearse(preparation, arguments.ranks, per_node, memory, arguments.planned)
    answer(json.dumps(figures, indent=2) if arguments.format == "json" else rehearsal_words(figures))
    return int(bool(figures["fails"]))


def _table(diagnosis: dict[str, Any]) -> str:
    keys = ("rank", "host", "local_rank", "device", "threads", "cores")
    rows = [tuple(key.replace("_", " ") for key in keys)]
    rows += [tuple(str(report[key]) for key in keys) for report in diagnosis["ranks"]]
    versions = diagnosis["ranks"][0]["versions"]
    width = max(map(len, versions))
    blocks = [
        f"{counted(len(rows) - 1, 'rank')}, launcher {diagnosis['launcher']}, transport {diagnosis['transport']}",
        columns(rows),
        "\n".join(wrapped(version, f"  {name:{width}}  ", " " * (width + 4)) for name, version in versions.items()),
    ]
    if diagnosis["transfers"]:
        times: list[tuple[str, ...]] = [("all-reduce bytes", "milliseconds", "GB/s", "bus GB/s")]
        for each in diagnosis["transfers"]:
            rates = (f"{each[key] / 1e9:.3f}" for key in ("bytes_per_second", "bus_bytes_per_second"))
            times.append((str(each["bytes"]), f"{each['seconds'] * 1e3:.3f}", *rates))
        blocks.append(columns(times))
    else:
        blocks.append("one rank alone: no bandwidth measured")
    blocks += [wrapped(f"warning: {line}", "") for line in diagnosis["warnings"]]
    return "\n\n".join(blocks)
