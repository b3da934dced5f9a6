"""One image over several ranks: strong scaling in each halo mode.

    python -m benchmarks.spatial [--size 1024] [--ranks 1 2 4] [--json FILE]

Starts its own jobs under mpirun, one thread a rank, and prints tables in markdown. Cases take turns, and ratios are of
neighbouring passes. README.md says what the figures answer and what two cores can show.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.launching import NOT_RUNNABLE, NotRunnableError
from benchmarks.spatial.scaling import Effort, efficiency_table, measure_scaling, scaling_table
from benchmarks.spread import Spread
from tiledseg.errors import TiledsegError


def main() -> int:
    options = _parser().parse_args()
    effort = Effort(options.passes, options.steps, options.limit)
    try:
        answer = measure_scaling(options.size, options.levels, options.base_channels, options.ranks, effort)
    except NotRunnableError as error:
        print(f"not runnable: {error}", file=sys.stderr)
        return NOT_RUNNABLE
    except TiledsegError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    network = f"U-Net L = {options.levels}, {options.base_channels} base channels, image {options.size} px"
    print(f"Strong scaling: {network}, fp32, one thread a rank, {answer['cores']} cores\n\n{scaling_table(answer)}")
    ceiling = answer["ceiling"]
    speed_up = Spread(**ceiling["speed_up"])
    print(f"\nLosses of all cases agree to {answer['largest_difference_of_losses']:.1e}. ", end="")
    print(f"{ceiling['processes']} processes of one rank side by side take {speed_up} x the steps of one.")
    print(f"\n{efficiency_table(answer)}")
    if options.json:
        options.json.write_text(json.dumps(answer, indent=1))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, default=1024, help="pixels a side of the image")
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--base-channels", type=int, default=16)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    parser.add_argument("--passes", type=int, default=3, help="times that all jobs are run, in turn")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each case in a job")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a job is ended")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
