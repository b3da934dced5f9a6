"""Our spatial layers beside DistDL's and ShardTensor's on one workload, taken in turn job by job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.launching import NotRunnableError, mpirun, run_job, torchrun
from benchmarks.spatial.scaling import Effort
from benchmarks.spread import Spread, markdown, ratios
from tiledseg.errors import CommunicationError

MESHES = ((1, 2), (2, 2))


@dataclass(frozen=True)
class Contestant:
    """A program that takes the peers' flags and prints their line; `path` is what PYTHONPATH must hold for it."""

    name: str
    program: str
    arguments: tuple[str, ...] = ()
    path: str | None = None
    launcher: str = "mpirun"

    def command(self, mesh: tuple[int, int], flags: Sequence[str]) -> list[str]:
        start = mpirun if self.launcher == "mpirun" else torchrun
        words = (*flags, "--mesh", str(mesh[0]), str(mesh[1]), *self.arguments)
        return start(mesh[0] * mesh[1], f"benchmarks.spatial.{self.program}", *words)

    def environment(self) -> dict[str, str]:
        if self.path is None:
            return {}
        return {"PYTHONPATH": os.pathsep.join(filter(None, (self.path, os.environ.get("PYTHONPATH"))))}


def contestants(distdl: str | None, physicsnemo: str | None) -> list[Contestant]:
    """Ours (channels last over Gloo first: the others are held against it), and the peers with the paths of their
    sources."""
    return [
        Contestant("tiledseg", "ours"),
        Contestant("tiledseg, over MPI", "ours", ("--transport", "mpi")),
        Contestant("tiledseg, contiguous", "ours", ("--layout", "contiguous")),
        Contestant("DistDL, over MPI", "peers.distdl_layers", path=distdl),
        Contestant(
            "ShardTensor, over Gloo",
            "peers.shardtensor_layers",
            path=physicsnemo,
            launcher="torchrun",
        ),
    ]


def measure_side_by_side(
    everyone: Sequence[Contestant],
    workloads: Mapping[str, Sequence[str]],
    repeat: int,
    effort: Effort,
    meshes: Sequence[tuple[int, int]] = MESHES,
) -> list[dict[str, Any]]:
    """A row for each workload (by name, with its flags), mesh and contestant; `reason` where one cannot be run."""
    rows = []
    for workload, own_flags in workloads.items():
        flags = ("--workload", workload, *own_flags, "--repeat", str(repeat))
        for mesh in meshes:
            found = _take_turns(everyone, mesh, flags, effort)
            ours = found[everyone[0].name]
            rows += [{"workload": workload, "mesh": mesh, **_row(name, own, ours)} for name, own in found.items()]
    return rows


def _take_turns(
    everyone: Sequence[Contestant], mesh: tuple[int, int], flags: Sequence[str], effort: Effort
) -> dict[str, list[dict[str, Any]] | str]:
    """The lines of each contestant, one a pass, or why there are none; who has failed once is not asked again."""
    found: dict[str, list[dict[str, Any]] | str] = {contestant.name: [] for contestant in everyone}
    for _ in range(effort.passes):
        for contestant in everyone:
            own = found[contestant.name]
            if isinstance(own, str):
                continue
            try:
                own.append(run_job(contestant.command(mesh, flags), effort.limit, contestant.environment()))
            except NotRunnableError as error:
                found[contestant.name] = f"not runnable: {error}"
            except CommunicationError as error:
                if contestant.path is None:  # our own must run
                    raise
                found[contestant.name] = f"failed: {error}"
    return found


def _row(name: str, own: list[dict[str, Any]] | str, ours: list[dict[str, Any]] | str) -> dict[str, Any]:
    if isinstance(own, str):
        return {"who": name, "reason": own}
    assert not isinstance(ours, str), "our own layers run wherever a peer does"
    seconds = [line["seconds"] for line in own]
    return {
        "who": name,
        "seconds": Spread.of(seconds).to_dict(),
        "over_ours": ratios(seconds, [line["seconds"] for line in ours]).to_dict(),
        "equal": own[0]["equal"],
        "notes": own[0]["notes"],
    }


def side_by_side_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ("workload", "ranks", "who", "seconds a step", "time over ours", "y", "dx", "dW: differ from torch's by")
    return markdown(head, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[object]:
    cells: list[object] = [row["workload"], f"{row['mesh'][0]} x {row['mesh'][1]}", row["who"]]
    if "reason" in row:
        return [*cells, row["reason"], "", "", "", ""]
    differences = [f"{row['equal'][key]:.1e}" for key in ("y", "dx", "dW")]
    return [*cells, Spread(**row["seconds"]), Spread(**row["over_ours"]), *differences]
