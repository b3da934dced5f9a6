"""`tiledseg plan`: halos, efficiency, memory, halo modes, pipeline and cluster, before any job."""

from __future__ import annotations

from tiledseg.entry import enter

if __name__ == "__main__":
    enter("tiledseg.plan")

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tiledseg.architecture.network import Network
from tiledseg.architecture.options import ENCODERS, NORMS, PADDINGS, UPSAMPLINGS
from tiledseg.architecture.presets import NAMES, PRESETS, build_network
from tiledseg.byte_sizes import parse_bytes
from tiledseg.command import Parser, add_format_option, json_map, run
from tiledseg.config import ModelConfig
from tiledseg.config_parallel import HALO_MODES
from tiledseg.console import answer
from tiledseg.errors import ConfigError, OutputError
from tiledseg.outputs import check_outputs, whole
from tiledseg.planning.jobs.script import batch_script, parse_minutes
from tiledseg.planning.jobs.site import SYSTEMS, find_site
from tiledseg.planning.machine import Machine, parse_bandwidth, parse_flops, parse_latency
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.stages import ask_stages, parse_counts, parse_modes
from tiledseg.schedules import SCHEDULES
from tiledseg.widths import ACTIVATION_BYTES

if TYPE_CHECKING:  # whoever asks for help, or flags wrongly, waits for no planner
    from tiledseg.planning.answer.question import Question
    from tiledseg.planning.answer.report import Planned

MODEL_FLAGS = ("levels", "convs_per_level", "kernel", "base_channels", "padding", "norm", "upsampling", "encoder")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan and returns the exit code: 0, or 2 for bad input."""
    return run(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> None:
    flags = _parser().parse_args(argv)
    from tiledseg.planning.answer.report import plan
    from tiledseg.planning.answer.table import table

    question = _question(flags)
    emit = _emitted(flags)
    if flags.plot is not None:
        _check_plot(flags.plot)
    planned = plan(question, _stages(flags))
    if flags.plot is not None:
        _plot(flags.plot, question, planned)
    if emit is not None:
        answer(emit(question, planned))
    else:
        answer(json.dumps(planned.answer, indent=2) if flags.format == "json" else table(question, planned.answer))


def _emitted(flags: Namespace) -> Callable[[Question, Planned], str] | None:
    """What writes the batch script, if one is asked for."""
    from tiledseg.planning.jobs.job import planned_job

    if flags.emit is None:
        for name in ("site", "time", "halo"):
            if getattr(flags, name) is not None:
                raise ConfigError(
                    f"--{name} is {getattr(flags, name)}, but --emit is not given; give --emit slurm or lsf"
                )
        return None
    if flags.format == "json":
        raise ConfigError(f"--emit {flags.emit} prints a script and --format json a plan; leave one of them out")
    site = find_site(flags.emit, flags.site or "generic")
    minutes = parse_minutes(flags.time or "2:00")
    return lambda question, planned: batch_script(site, planned_job(question, planned, site, minutes, flags.halo))


def _check_plot(path: str) -> None:
    if Path(path).suffix.lower() != ".png":
        raise OutputError(f"--plot is '{path}'; give a file name that ends in .png")
    check_outputs([whole("--plot", path)])


def _plot(path: str, question: Question, planned: Planned) -> None:
    if planned.tiling is None:
        raise ConfigError(f"--plot draws exact tiles, but --stride is {question.stride}; leave one of them out")
    try:
        from tiledseg.planning.answer.plot import write_plot  # matplotlib is slow to import, and an extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"--plot needs {error.name}, which is not installed; pip install 'tiledseg[plot]'") from None
    write_plot(path, question, planned.tiling, planned.pipeline)


def _parser() -> Parser:
    default = ModelConfig()
    parser = Parser(prog="tiledseg plan", description="Calculates halos, efficiency, memory and cluster of a tiling.")
    raster = parser.add_argument_group("raster and grid")
    raster.add_argument(
        "--size", nargs="+", type=int, required=True, metavar="N", help="side, or height and width (px)"
    )
    raster.add_argument(
        "--grid", nargs="+", default=["8"], metavar="Q", help="Q, or rows and columns of tiles, or auto (default 8)"
    )
    raster.add_argument("--window", type=int, metavar="N", help="side of random windows (px), of train.window")
    raster.add_argument("--bands", type=int, default=4, help="input bands (default 4)")
    raster.add_argument("--classes", type=int, default=2, help="classes (default 2)")
    model = parser.add_argument_group("network")
    model.add_argument("--model", choices=NAMES, default="unet", help="a network, or a preset of the paper (see docs)")
    model.add_argument("--levels", type=int, help=f"levels, the bottom included (default {default.levels})")
    model.add_argument("--convs-per-level", type=int, help=f"convolutions a level (default {default.convs_per_level})")
    model.add_argument("--kernel", type=int, help=f"side of a kernel, odd (default {default.kernel})")
    model.add_argument(
        "--base-channels", type=int, help=f"channels of the first level (default {default.base_channels})"
    )
    model.add_argument("--padding", choices=PADDINGS, help=f"padded or unpadded (default {default.padding})")
    model.add_argument("--norm", choices=NORMS, help=f"normalisation (default {default.norm})")
    model.add_argument("--upsampling", choices=UPSAMPLINGS, help=f"on the way up (default {default.upsampling})")
    model.add_argument("--encoder", choices=ENCODERS, help=f"of residual_unet, gated_scnn (default {default.encoder})")
    model.add_argument("--build", metavar="PACKAGE.MODULE:FUNCTION", help="code that builds a network, which is run")
    model.add_argument("--arguments", type=json_map, metavar="MAP", help='what --build is called with, {"width": 16}')
    model.add_argument(
        "--stride", type=int, default=1, help="S of the paper's formula (default 1; others have no exact plan)"
    )
    cluster = parser.add_argument_group("memory and cluster")
    cluster.add_argument("--precision", choices=tuple(ACTIVATION_BYTES), default="fp32", help="(default fp32)")
    cluster.add_argument("--gpu-memory", metavar="SIZE", help="memory of a GPU, 16GiB say")
    cluster.add_argument(
        "--memory-budget", metavar="SIZE", help="what a step may take: what is rebuilt then, and the largest tile"
    )
    cluster.add_argument("--gpus-per-node", type=int, default=6, help="GPUs a node (default 6)")
    cluster.add_argument("--images", type=int, default=1, help="images an epoch (default 1)")
    cluster.add_argument("--gpus", type=int, help="GPUs in all (default: one for each tile of an image)")
    modes = parser.add_argument_group("halo modes")
    modes.add_argument(
        "--mesh", nargs="+", type=int, metavar="R", help="rows and columns of ranks an image (default: one a tile)"
    )
    modes.add_argument("--flops", metavar="F", help="flop/s that a rank reaches, 10T say (default 10T, assumed)")
    modes.add_argument("--bandwidth", metavar="B", help="bytes/s between ranks, 10GB say (default 10GB, assumed)")
    modes.add_argument("--latency", metavar="T", help="seconds a message, 20us say (default 20us, assumed)")
    pipeline = parser.add_argument_group("pipeline")
    pipeline.add_argument("--stages", type=int, metavar="N", help="GPUs that share the layers (default: no pipeline)")
    pipeline.add_argument("--balance", metavar="B", help="layers of each stage, [14,24,30,22,12,7], or auto (default)")
    pipeline.add_argument("--micro-batches", type=int, metavar="M", help="tiles a step (default: 4 a stage)")
    pipeline.add_argument("--schedule", choices=SCHEDULES, help="order of the passes (default 1f1b)")
    pipeline.add_argument(
        "--recompute", metavar="MODE", help="never (default), except_last, always; or a list, one a stage"
    )
    job = parser.add_argument_group("batch job")
    job.add_argument("--emit", choices=SYSTEMS, help="prints a batch script for the plan in place of the plan")
    job.add_argument("--site", help="generic (default), frontier, perlmutter; under lsf generic, summit")
    job.add_argument("--time", metavar="H:MM", help="wall time of the job (default 2:00)")
    job.add_argument("--halo", choices=HALO_MODES, help="mode of the job (default: the one that the plan chooses)")
    add_format_option(parser)
    parser.add_argument(
        "--plot", metavar="FILE.png", help="draws the tiles, E against the grid, and the pipeline's step"
    )
    return parser


def _network(flags: Namespace) -> Network:
    network = build_network(_model(flags), flags.bands, flags.classes)
    if flags.build is None:
        return network
    from tiledseg.tracing.build import known  # torch, and the code of the network's author

    return known(network)


def _question(flags: Namespace) -> Question:
    from tiledseg.planning.answer.question import Question

    return Question(
        size=_two("--size", flags.size),
        network=_network(flags),
        grid=_grid(flags.grid),
        stride=flags.stride,
        precision=flags.precision,
        gpu_memory=None if flags.gpu_memory is None else parse_bytes(flags.gpu_memory),
        memory_budget=None if flags.memory_budget is None else parse_bytes(flags.memory_budget),
        gpus_per_node=flags.gpus_per_node,
        images=flags.images,
        gpus=flags.gpus,
        mesh=None if flags.mesh is None else _two("--mesh", flags.mesh),
        machine=_machine(flags),
        window=flags.window,
    )


def _stages(flags: Namespace) -> Parallelism | None:
    parts = {key: getattr(flags, key) for key in ("balance", "micro_batches", "schedule", "recompute")}
    given = {key: value for key, value in parts.items() if value is not None}
    if flags.stages is None:
        if given:
            flag = next(iter(given)).replace("_", "-")
            raise ConfigError(f"--{flag} is {next(iter(given.values()))}, but --stages is not given; give --stages N")
        return None
    if flags.stride != 1:
        raise ConfigError(
            f"--stages is {flags.stages}, but networks of --stride {flags.stride} have no exact plan; leave it out"
        )
    if "balance" in given:
        given["balance"] = parse_counts(given["balance"])
    if "recompute" in given:
        given["recompute"] = parse_modes(given["recompute"])
    return ask_stages(flags.stages, **given)


def _machine(flags: Namespace) -> Machine:
    parsers = {"flops": parse_flops, "bandwidth": parse_bandwidth, "latency": parse_latency}
    given = {key: parse(getattr(flags, key)) for key, parse in parsers.items() if getattr(flags, key) is not None}
    if given and flags.stride != 1:
        raise ConfigError(
            f"--{next(iter(given))} is given, but networks of --stride {flags.stride} have no exact plan; leave it out"
        )
    return Machine(**given)


def _model(flags: Namespace) -> ModelConfig:
    given = {key: getattr(flags, key) for key in MODEL_FLAGS if getattr(flags, key) is not None}
    preset = PRESETS.get(flags.model)
    for key, value in given.items():
        fixed = getattr(preset, key, value)
        if fixed != value:
            flag = f"--{key.replace('_', '-')}"
            raise ConfigError(
                f"{flag} is {value}, but the preset {flags.model} has {fixed}; leave {flag} or --model out"
            )
    model = ModelConfig(name=flags.model, build=flags.build, arguments=flags.arguments or {}, **given)
    model.check()
    return model


def _grid(words: Sequence[str]) -> tuple[int, int] | None:
    if list(words) == ["auto"]:
        return None
    try:
        return _two("--grid", [int(word) for word in words])
    except ValueError:
        raise ConfigError(f"--grid is '{' '.join(words)}'; give auto, Q, or rows and columns") from None


def _two(flag: str, values: Sequence[int]) -> tuple[int, int]:
    if len(values) > 2:
        raise ConfigError(f"{flag} has {len(values)} values; give one, or rows and columns")
    return values[0], values[-1]
