"""On a GPU: several ranks share it, their halos going through host memory, and the cost of the conversion alone.

    python -m benchmarks.spatial.gpu [--ranks 1 2 4] [--size 1024] [--device cuda]

Correctness: the losses of a few optimizer steps in every halo mode, on every number of ranks, are held against those of
one rank. Ranks that share a GPU take turns on it, so their times say what the staging costs and nothing of scaling.
Exits 3 with "no GPU" where there is none; `--device cpu` runs the same programs, which shows that they work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.launching import NOT_RUNNABLE, mpirun, run_job
from benchmarks.spatial.conversion import conversion_table, measure_conversions
from benchmarks.spatial.scaling import ALONE, CASES, JOB
from benchmarks.spatial.step_case import StepJob, check_losses, mesh_of
from benchmarks.spread import Spread, markdown
from tiledseg.errors import TiledsegError

# Sums are taken in another order by each number of ranks, and cuDNN may choose another kernel for each block's size.
BOUND = 1e-4


def main() -> int:
    options = _parser().parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU", file=sys.stderr)
        return NOT_RUNNABLE
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the jobs choose their device by what is there
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, U-Net L = {options.levels}, {options.base_channels} base channels, fp32")
    found: dict[str, Any] = {"device": name, "torch": torch.__version__}
    try:
        found["ranks"] = shared_device(options)
        print(f"\n{_ranks_table(found['ranks']['rows'])}\n")
        print(f"Losses agree to {found['ranks']['largest_difference_of_losses']:.1e}.\n", flush=True)
        found["conversion"] = measure_conversions(
            options.conversion_sizes,
            options.levels,
            options.base_channels,
            options.pairs,
            options.limit,
            options.device,
        )
        print(conversion_table(found["conversion"]))
    except TiledsegError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def shared_device(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of all cases on each number of ranks. Raises TiledsegError where losses differ from those of one rank."""
    rows, losses = [], []
    for ranks in sorted({1, *options.ranks}):
        cases = ALONE if ranks == 1 else CASES
        job = StepJob(mesh_of(ranks), cases, options.size, options.levels, options.base_channels, options.steps)
        answer = run_job(mpirun(ranks, JOB, job.to_json()), options.limit)
        for case, figures in zip(cases, answer["cases"], strict=True):
            about = {key: answer[key] for key in ("device", "transport")}
            rows.append({"ranks": ranks, "mode": str(case), **about, **figures})
            losses.append(figures["losses"])
    names = [f"{row['mode']} on {row['ranks']} ranks" for row in rows]
    return {"largest_difference_of_losses": check_losses(losses, names, BOUND), "rows": rows}


def _ranks_table(rows: list[dict[str, Any]]) -> str:
    head = (
        "ranks",
        "mode",
        "device",
        "transport",
        "seconds a step",
        "halo bytes",
        "messages",
        "peak memory a rank, MiB",
    )
    return markdown(head, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    memory = f"{row['memory_bytes'] / 2**20:.0f}"  # of all cases so far, since they share the process
    seconds = Spread.of(row["seconds"])
    traffic = f"{row['halo_bytes']:,}", f"{row['halo_messages']:,}"
    return row["ranks"], row["mode"], row["device"], row["transport"], seconds, *traffic, memory


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--base-channels", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--conversion-sizes", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a job is ended")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
