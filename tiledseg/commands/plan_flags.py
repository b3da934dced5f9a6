"""The flags of `tiledseg plan`: their checks, the planner's question, and its answer as text."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tiledseg.architecture.network import ForeignNetwork, Network
from tiledseg.architecture.presets import PRESETS, build_network
from tiledseg.architecture.unet import UNet
from tiledseg.commands.options import MODEL_KEYS, PIPELINE_KEYS, config_of, value_of
from tiledseg.commands.parser import flag_of, refuse_given
from tiledseg.config.checks import MOST, Range
from tiledseg.config.parallel import REBUILDS
from tiledseg.config.run import ModelConfig
from tiledseg.errors import ConfigError, renamed, require
from tiledseg.geometry.layers.declared import CropGrid
from tiledseg.planning.answer.report import formula, plan
from tiledseg.planning.jobs.job import Site, find_site, parse_minutes, planned_script, searched_script
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.run.spread import Parallelism, parallelism
from tiledseg.planning.walk.cost_model import Machine
from tiledseg.system.console import say
from tiledseg.system.outputs import check_ending, check_outputs, whole
from tiledseg.units import MOST_BYTES, parse_bytes
from tiledseg.user_files.machine import find_machine

_SEARCHED = ("mesh", *PIPELINE_KEYS, "recompute", "halo", "memory_budget", "model.window", "model.overlap")
"""Flags of settings that a search finds by itself."""
_EXACT = (
    *("mesh", "parallel.stages", "recompute", "memory_budget", "model.window", "model.overlap", "plot", "emit"),
    *("search", "scaling", "machine"),
)
"""Flags of plans by tiles, which networks of another stride do not have."""
_COUNTS = "size", "grid", "stride", "gpus_per_node", "images", "images_per_step", "gpus", "mesh"
_PLAIN = (*MODEL_KEYS, *PIPELINE_KEYS, "model.window", "model.overlap")
_NAMES = {key: flag_of(key) for key in (*_PLAIN, "parallel.recompute")} | {"model.name": "--model"}
_MOST_STAGES, _MOST_MICRO_BATCHES = 32, 256  # limits of the simulation, which then takes a few seconds


def answered(flags: Namespace) -> tuple[dict[str, Any], str]:
    """Make the plan of the flags, and write its plot; return its values, and its text or batch script. Raises
    ConfigError or OutputError."""
    if flags.scaling or flags.emit or flags.search or flags.format == "json":
        refuse_given(flags, ("show",), "only the plan's table has sections")
    if flags.stride != 1:
        refuse_given(flags, _EXACT, f"networks of --stride {flags.stride} have no exact plan")
    if flags.scaling is not None or flags.search:
        return _searched(flags)
    question, budget, site_and_minutes = _question(flags), _bytes(flags.memory_budget), _site_and_minutes(flags)
    stages = _pipeline(flags)
    if flags.plot is not None:
        check_ending("--plot", flags.plot, ".png")
        check_outputs([whole("--plot", flags.plot)])
    planned = plan(question, stages, budget) if flags.stride == 1 else formula(question, flags.stride)
    if flags.plot is not None and planned.tiling is not None:
        require("--plot", "plot", "matplotlib")
        from tiledseg.planning.answer.plot import draw  # here: matplotlib is slow to import

        draw(flags.plot, question, planned.tiling)
    if site_and_minutes is not None:
        return planned.values, planned_script(*site_and_minutes, question, planned, budget, flags.halo)
    return planned.values, planned.text(flags.show)


def _searched(flags: Namespace) -> tuple[dict[str, Any], str]:
    """Answer --search (best settings, or their batch script) or --scaling (time by number of GPUs)."""
    from tiledseg.planning.answer.search import parse_range, scaling_part, search_part, searchable
    from tiledseg.planning.search import search

    flag = "--search" if flags.scaling is None else "--scaling"
    own = [name for name in (*_SEARCHED, "plot") if name != "halo" or flag == "--scaling"]
    refuse_given(flags, own, f"{flag} finds settings", "leave one of them out")
    if flags.scaling is not None:
        numbers = parse_range(flags.scaling)
        words = "--scaling has its own GPUs and no job"
        refuse_given(flags, ("search", "gpus", "emit", "site", "time"), words, "leave one of them out")
        part = scaling_part(searchable(replace(_question(flags), ranks=numbers[0])), numbers)
        return {"scaling": part.values}, part.text
    site_and_minutes, question = _site_and_minutes(flags), searchable(_question(flags))
    found = search(question, question.figures.ranks_per_host, flags.halo)
    part = search_part(question, found, flags.images > 1 and flags.images_per_step is None)
    text = part.text if site_and_minutes is None else searched_script(*site_and_minutes, question, found.winner)
    return {"search": part.values}, text


def _site_and_minutes(flags: Namespace) -> tuple[Site, int] | None:
    """Return the site and the minutes of the batch script, checked; None without --emit."""
    if flags.emit is None:
        own = ("site", "time") if flags.search else ("site", "time", "halo")
        refuse_given(flags, own, "--emit is not given", "give --emit slurm or lsf")
        return None
    if flags.format == "json":
        raise ConfigError(f"--emit {flags.emit} prints a script and --format json a plan; leave one of them out")
    return find_site(flags.emit, flags.site or "generic"), parse_minutes(flags.time or "2:00")


def _network(flags: Namespace, given: ModelConfig) -> Network:
    with renamed(_NAMES):
        network = build_network(_model_config(flags, given), flags.bands, flags.classes)
    if not isinstance(network, ForeignNetwork):
        return network
    from tiledseg.tracing.build import known  # here: it imports torch, and runs the code of --build

    try:
        return known(network)
    except ConfigError as error:
        if given.window is None or network.crops is not None:
            raise
        say(f"warning: not traced: {error}; planned as with model.window {given.window}, and --overlap")
    return known(replace(network, crops=CropGrid(given.window)))


def _question(flags: Namespace) -> RunQuestion:
    """Return the planner's question of the flags, checked. Without --grid, a search is free to choose one."""
    machine, memory = _machine(flags), _bytes(flags.gpu_memory)
    if memory and machine.memory and memory > machine.memory:
        say(f"warning: --gpu-memory is {flags.gpu_memory}, but {machine.name} has {machine.memory / 2**30:.4g} GiB")
    memory = machine.memory if memory is None else memory
    stages = vars(flags)["parallel.stages"]
    fits_alone = memory is not None and flags.stride == 1 and flags.mesh is None and stages is None
    searches = flags.search or flags.scaling is not None
    words = flags.grid or ["auto" if fits_alone or searches else "8"]
    size, grid = _pair("--size", flags.size), None
    if list(words) != ["auto"]:
        try:
            grid = _pair("--grid", [int(word) for word in words])
        except ValueError:
            raise ConfigError(f"--grid is '{' '.join(words)}'; give auto, Q, or rows and columns") from None
    mesh = None if flags.mesh is None else _pair("--mesh", flags.mesh)
    values = {name: getattr(flags, name) for name in _COUNTS} | {"size": size, "grid": grid, "mesh": mesh}
    values |= {"gpu_memory": memory, "memory_budget": _bytes(flags.memory_budget)}
    for name, value in values.items():
        for number in () if value is None else value if isinstance(value, tuple) else (value,):
            Range(1, MOST if name in _COUNTS else MOST_BYTES).check(flag_of(name), number)
    model = config_of(flags).model
    network, recompute = _network(flags, model), flags.recompute if flags.recompute in REBUILDS else "auto"
    if flags.stride != 1 and not isinstance(network, UNet):
        raise ConfigError(
            f"--stride is {flags.stride}, the paper's formula for its U-Nets, but the network is another one; leave "
            "one of --stride and --model out"
        )
    if grid is None and flags.stride != 1:
        refuse_given(flags, ("grid",), f"networks of --stride {flags.stride} have no exact plan", "give a number")
    if recompute != "auto" and flags.memory_budget is not None:
        refuse_given(flags, ("recompute",), "--memory-budget is given, which chooses that", "leave one of them out")
    if grid is None and memory is None and not searches:
        raise ConfigError("--grid is auto, and fits tiles to a GPU; give --gpu-memory, 16GiB say, --machine or a grid")
    if model.window is not None and model.window > min(size):
        refuse_given(flags, ("model.window",), f"the raster has {min(size)} px along one side", "give at most so many")
    if (flags.images_per_step or 0) > flags.images:
        refuse_given(flags, ("images_per_step",), f"--images is {flags.images}", "give at most so many")
    return RunQuestion(
        network,
        (Extent(size),),
        flags.gpus or 0,
        MOST_BYTES if memory is None else memory,
        Parallelism(mesh=mesh),
        flags.precision,
        grid=grid,
        images_per_step=flags.images_per_step or 0,
        machine=machine,
        recompute=recompute,
        images=flags.images,
    )


def _bytes(text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)


def _pipeline(flags: Namespace) -> Parallelism | None:
    """Return the settings of a pipeline, checked like the group `parallel`; None without --stages."""
    own = ("recompute",) if flags.recompute not in (None, *REBUILDS) else ()
    if vars(flags)["parallel.stages"] is None:
        refuse_given(flags, (*PIPELINE_KEYS, *own), "--stages is not given", "give --stages N")
        return None
    with renamed(_NAMES):
        config = config_of(flags).parallel
        if own:
            config = replace(config, recompute=value_of("parallel.recompute", flags.recompute, "--recompute"))
        Range(1, _MOST_STAGES).check("--stages", config.stages)
        Range(1, _MOST_MICRO_BATCHES).check("--micro-batches", config.micro_batches or 1)
        if config.stages > 1:
            config.check()
        return parallelism(config)


def _machine(flags: Namespace) -> Machine:
    site = None if flags.emit is None else find_site(flags.emit, flags.site or "generic").machine
    if flags.machine is None and site is None:
        return Machine() if flags.gpus_per_node is None else Machine(ranks_per_host=flags.gpus_per_node)
    machine = find_machine(flags.machine or site or "")
    gpus = flags.gpus_per_node or machine.ranks_per_host
    for word, known in ((site, site and find_machine(site)), (f"--machine {flags.machine}", machine)):
        if known and gpus > known.ranks_per_host:
            most = known.ranks_per_host
            raise ConfigError(f"--gpus-per-node is {gpus}, but nodes of {word} have {most} GPUs; give at most {most}")
    return replace(machine, ranks_per_host=gpus)


def _model_config(flags: Namespace, given: ModelConfig) -> ModelConfig:
    """Return the network's configuration, checked. A module of one input size has crops once an overlap is given."""
    if vars(flags)["model.build"] is None:
        refuse_given(flags, ("model.window", "model.overlap"), "--build is not given")
    model, preset = replace(given, name=flags.model), PRESETS.get(flags.model)
    model.check()
    for name, fixed in vars(preset).items() if preset else ():
        if fixed != getattr(model, name, fixed):
            refuse_given(flags, (f"model.{name}",), f"the preset {flags.model} has {fixed}", "leave one of them out")
    return model if vars(flags)["model.overlap"] is not None else replace(model, window=None)


def _pair(flag: str, values: Sequence[int]) -> tuple[int, int]:
    if len(values) > 2:
        raise ConfigError(f"{flag} has {len(values)} values; give one, or rows and columns")
    return values[0], values[-1]
