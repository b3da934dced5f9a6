"""`tiledseg plan`: plans halos, efficiency, memory, halo modes, pipeline and cluster before any job."""

from __future__ import annotations

from tiledseg.commands.entry import enter

if __name__ == "__main__":
    enter("tiledseg.plan")

import gc
import json
from collections.abc import Sequence
from typing import Any

from tiledseg.commands.options import MODEL_KEYS, PIPELINE_KEYS, add_keys, parse
from tiledseg.commands.parser import Parser, add_format_option, command, make_callable, refuse_given
from tiledseg.config.checks import checked
from tiledseg.config.parallel import HALO_MODES
from tiledseg.config.words import NETWORKS, PRESET_NAMES, SYSTEMS
from tiledseg.errors import ConfigError
from tiledseg.system.console import answer
from tiledseg.units import ACTIVATION_BYTES


@command
def main(words: Sequence[str]) -> int:
    """Print the plan."""
    parser = _parser()
    flags = parser.parse_args(words)
    if flags.calibrate is not None:
        changed = [name for name, value in vars(flags).items() if value != parser.get_default(name)]
        others = [name for name in changed if name not in ("calibrate", "store")]
        refuse_given(flags, others, "--calibrate measures this machine and plans nothing", "leave one of them out")
        from tiledseg.commands.calibrate import calibrate_to  # here: it imports torch

        return calibrate_to(flags.calibrate, flags.store)
    refuse_given(flags, ("store",), "--calibrate is not given")
    from tiledseg.commands.plan_flags import answered  # here: --help does not wait for the planner

    gc.set_threshold(50_000)  # a plan makes many small values, and few of them in cycles
    values, text = answered(flags)
    answer(json.dumps(values, indent=2) if flags.format == "json" else text)
    return 0


@checked
def plan(size: int | tuple[int, int], **flags: Any) -> dict[str, Any]:
    """Plan a job like `tiledseg plan`; return the values that `--format json` prints.

    `size`: side of the raster, or (height, width) in pixels. `flags`: any other flag of the command, with `_` for `-`:
    `gpus=64`, `grid=(4, 8)`, `gpu_memory="16GiB"`, `search=True`; `plot` writes a file. Raises ConfigError,
    GeometryError or OutputError with the command's message.
    """
    from tiledseg.commands.plan_flags import answered

    for name in ("calibrate", "store", "emit", "show"):
        if flags.get(name) is not None:
            raise ConfigError(f"{name} is given, but only the command has it: tiledseg plan --{name}")
    return answered(parse(_parser(), (), {"size": size, **flags}))[0]


make_callable(__name__, plan)


def _parser() -> Parser:
    purpose = "Say if a network fits, on which tiles, in which halo mode, on how many GPUs and how fast."
    parser = Parser(
        "tiledseg plan", "--size 10000 --machine h100", usage="tiledseg plan [FLAG ...]", description=purpose
    )
    raster = parser.add_argument_group("raster and grid")
    raster.add_argument(
        "--size", nargs="+", type=int, default=[10000], help="side, or height and width (px; default 10000)"
    )
    raster.add_argument(
        "--grid",
        nargs="+",
        metavar="Q",
        help="Q, or rows and columns of tiles, or auto (default where a memory is known; else 8)",
    )
    window = "side (px) of the one image size that --build takes"
    add_keys(raster, ("model.window", "model.overlap"), plain=True, window=window)
    raster.add_argument("--bands", type=int, default=4, help="input bands (default 4)")
    raster.add_argument("--classes", type=int, default=2, help="classes (default 2)")
    model = parser.add_argument_group("network")
    names = *NETWORKS, *PRESET_NAMES
    model.add_argument("--model", choices=names, default="unet", help="a network, or a preset of the paper (see docs)")
    add_keys(model, MODEL_KEYS, plain=True)
    model.add_argument("--stride", type=int, default=1, help="S of the paper's formula (default 1; others: no plan)")
    cluster = parser.add_argument_group("memory and cluster")
    cluster.add_argument("--precision", choices=tuple(ACTIVATION_BYTES), default="fp32", help="(default fp32)")
    cluster.add_argument("--gpu-memory", metavar="SIZE", help="memory of a GPU, 16GiB say (default: of the machine)")
    cluster.add_argument("--memory-budget", metavar="SIZE", help="limit of a step: shows what to recompute then")
    cluster.add_argument("--gpus-per-node", type=int, help="GPUs a node (default: of the machine, else 6)")
    cluster.add_argument("--images", type=int, default=1, help="images an epoch (default 1)")
    cluster.add_argument(
        "--images-per-step",
        type=int,
        metavar="B",
        help="images of a step, at most --images (default: as many as GPUs take at a tile each)",
    )
    cluster.add_argument("--gpus", type=int, help="GPUs in all (default: one for each tile of an image)")
    modes = parser.add_argument_group("halo modes")
    modes.add_argument(
        "--mesh", nargs="+", type=int, metavar="R", help="rows and columns of ranks an image (default: one a tile)"
    )
    modes.add_argument("--machine", metavar="NAME", help="a100, h100, h200, v100, frontier, perlmutter, cpu, a file")
    modes.add_argument("--calibrate", metavar="OUT.yaml", help="measures this machine in place of a plan: its profile")
    modes.add_argument("--store", metavar="FOLDER", help="with --calibrate: measures the disk of that folder too")
    pipeline = parser.add_argument_group("pipeline")
    add_keys(pipeline, PIPELINE_KEYS, plain=True, micro_batches="tiles a step (default: 4 a stage)")
    again = "as memory.recompute: auto, none, all; with --stages never, except_last, always, or a list"
    pipeline.add_argument("--recompute", metavar="MODE", help=again)
    found = parser.add_argument_group("search")
    found.add_argument("--search", action="store_true", help="finds the best settings for --gpus of a --machine")
    found.add_argument("--scaling", metavar="A:B", help="time and efficiency on A to B GPUs, as 64:1536")
    job = parser.add_argument_group("batch job")
    job.add_argument("--emit", choices=SYSTEMS, help="prints a batch script for the plan in place of the plan")
    job.add_argument("--site", help="generic (default), frontier, perlmutter; under lsf generic, summit")
    job.add_argument("--time", metavar="H:MM", help="wall time of the job (default 2:00)")
    job.add_argument("--halo", choices=HALO_MODES, help="mode of the job or search (default: what the plan chooses)")
    add_format_option(parser)
    parser.add_argument(
        "--show", metavar="SECTIONS", help="adds sections, memory,modes say, or all (docs/reference/plan-output.md)"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draws the tiles, and E against the grid")
    return parser
