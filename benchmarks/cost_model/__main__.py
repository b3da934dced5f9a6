"""Predicted against measured seconds of training steps, by a profile of this very machine.

    python -m tiledseg.plan --calibrate machine.yaml                    # or under mpirun -n 2, for the messages
    python -m benchmarks.cost_model measure FOLDER [--ranks 1 2 4]      # real runs, some minutes: nothing else at work
    python -m benchmarks.cost_model table machine.yaml FOLDER [FOLDER ...]
    python -m benchmarks.cost_model memory machine.yaml FOLDER           # a process for each run on one rank

`table` takes several folders, each measured by itself: their differences are the noise. What is measured is used for
nothing but the comparison.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.cost_model.cases import cases
from benchmarks.cost_model.table import memory_report, read, report
from benchmarks.launching import mpirun, python, run_process
from tiledseg.errors import CommunicationError
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.user_files.machine import find_machine

LIMIT_SECONDS = 1200


def main() -> int:
    options = _parser().parse_args()
    if options.what == "table":
        machine = Machine.known(find_machine(options.machine))
        print(report(read([Path(folder) for folder in options.folders], machine)))
        return 0
    folder = Path(options.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    _write_scenes(folder)
    if options.what == "memory":
        for case in cases():
            if case.ranks == 1:
                _job(python("benchmarks.cost_model.job", str(folder), "1", "3", case.name), case.name)
        print(memory_report(folder / "memory.jsonl", find_machine(options.machine).base))
        return 0
    for ranks in options.ranks:
        arguments = "benchmarks.cost_model.job", str(folder), str(ranks)
        _job(mpirun(ranks, *arguments) if ranks > 1 else python(*arguments), f"the runs on {ranks} ranks")
    return 0


def _job(command: list[str], what: str) -> None:
    done = run_process(command, LIMIT_SECONDS)
    if done.code:
        raise CommunicationError(f"{what} ended with code {done.code}: {done.reason}")


def _write_scenes(folder: Path) -> None:
    for side in sorted({case.side for case in cases()}):
        paths = [str(folder / f"{what}-{side}.tif") for what in ("image", "labels")]
        if not Path(paths[1]).exists():
            size = [str(side), str(side)]
            words = "--size", *size, "--bands", "4", "--seed", "1", "--image", paths[0], "--labels", paths[1]
            run_process(python("tiledseg.scene", *words), LIMIT_SECONDS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="what", required=True)
    measure = ways.add_parser("measure")
    measure.add_argument("folder")
    measure.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    memory = ways.add_parser("memory")
    memory.add_argument("machine")
    memory.add_argument("folder")
    table = ways.add_parser("table")
    table.add_argument("machine")
    table.add_argument("folders", nargs="+")
    return parser


if __name__ == "__main__":
    sys.exit(main())
