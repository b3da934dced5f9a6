"""One image over several ranks: strong scaling, what the options change, what the conversion costs, and the peers.

    python -m benchmarks.spatial [--parts scaling variants conversion peers] [--json FILE]
        [--distdl-path DIR] [--physicsnemo-path DIRS]

Starts its own jobs under mpirun, one thread a rank; prints tables in markdown. What is compared takes turns, and
ratios are of neighbouring passes. See README.md for what each part answers and what two cores can show.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.parts import run_parts
from benchmarks.spatial.conversion import conversion_table, measure_conversions
from benchmarks.spatial.scaling import Effort, efficiency_table, measure_scaling, scaling_table
from benchmarks.spatial.side_by_side import contestants, measure_side_by_side, side_by_side_table
from benchmarks.spatial.variants import measure_variants, variants_table
from benchmarks.spread import Spread

PARTS = ("scaling", "variants", "conversion", "peers")


def main() -> int:
    return run_parts(_parser().parse_args(), PROGRAMS)


def _scaling(options: argparse.Namespace) -> tuple[str, Any]:
    answer = measure_scaling(options.size, options.levels, options.base_channels, options.ranks, _effort(options))
    title = f"Strong scaling: {_network(options)}, fp32, one thread a rank, {answer['cores']} cores"
    losses = f"Losses of all cases agree to {answer['largest_difference_of_losses']:.1e}."
    ceiling = answer["ceiling"]
    speed_up = Spread(**ceiling["speed_up"])
    at_most = f"{ceiling['processes']} processes of one rank side by side take {speed_up} x the steps of one."
    return f"{title}\n\n{scaling_table(answer)}\n\n{losses} {at_most}\n\n{efficiency_table(answer)}", answer


def _variants(options: argparse.Namespace) -> tuple[str, Any]:
    ranks = options.variant_ranks
    answer = measure_variants(options.size, options.levels, options.base_channels, ranks, _effort(options))
    losses = f"Losses of all variants agree to {answer['largest_difference_of_losses']:.1e}."
    title = f"Options of layer mode on {ranks} ranks: {_network(options)}, fp32"
    return f"{title}\n\n{variants_table(answer)}\n\n{losses}", answer


def _conversion(options: argparse.Namespace) -> tuple[str, Any]:
    answers = measure_conversions(
        options.conversion_sizes, options.levels, options.base_channels, options.pairs, options.limit
    )
    title = f"Cost of the conversion alone: one rank, forward and backward, {options.pairs} pairs of steps"
    return f"{title}\n\n{conversion_table(answers)}", answers


def _peers(options: argparse.Namespace) -> tuple[str, Any]:
    size = [str(options.peer_size)] * 2
    unet = ["--levels", str(options.peer_levels), "--base-channels", str(options.peer_channels)]
    workloads = {
        "conv": ["--size", *size, "--channels", str(2 * options.peer_channels), "--dtype", options.dtype],
        "unet": ["--size", *size, *unet, "--dtype", options.dtype],
    }
    everyone = contestants(options.distdl_path, options.physicsnemo_path)
    rows = measure_side_by_side(everyone, workloads, options.peer_repeat, _effort(options))
    title = (
        f"Beside the peers: forward and backward, image {options.peer_size} px, {options.dtype}; "
        f"conv: 3 x 3, {2 * options.peer_channels} channels; unet: {' '.join(unet)}"
    )
    return f"{title}\n\n{side_by_side_table(rows)}", rows


PROGRAMS = {"scaling": _scaling, "variants": _variants, "conversion": _conversion, "peers": _peers}


def _effort(options: argparse.Namespace) -> Effort:
    return Effort(options.passes, options.steps, options.limit)


def _network(options: argparse.Namespace) -> str:
    return f"U-Net L = {options.levels}, {options.base_channels} base channels, image {options.size} px"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--size", type=int, default=1024, help="pixels a side of the image (scaling, variants)")
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--base-channels", type=int, default=16)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks (scaling)")
    parser.add_argument("--variant-ranks", type=int, default=2, help="ranks (variants)")
    parser.add_argument("--passes", type=int, default=3, help="times that all jobs are run, in turn")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each case in a job")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a job is ended")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of steps (conversion)")
    parser.add_argument("--conversion-sizes", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--peer-size", type=int, default=512)
    parser.add_argument("--peer-levels", type=int, default=3)
    parser.add_argument("--peer-channels", type=int, default=8, help="base channels; twice as many of the convolution")
    parser.add_argument("--peer-repeat", type=int, default=5, help="timed steps in a job (peers)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="(peers)")
    parser.add_argument("--distdl-path", help="folder of DistDL's package, to go on PYTHONPATH")
    parser.add_argument("--physicsnemo-path", help="that of PhysicsNeMo, and of what it needs, as in PYTHONPATH")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
