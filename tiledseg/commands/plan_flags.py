"""`tiledseg plan` from its flags: the question that they ask, checked, and its answer printed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from tiledseg.architecture.network import Network
from tiledseg.architecture.presets import PRESETS, build_network
from tiledseg.config.checks import MOST, Range
from tiledseg.config.memory import RECOMPUTE as NODES
from tiledseg.config.run import ModelConfig
from tiledseg.errors import ConfigError, install
from tiledseg.planning.answer.report import Planned, plan
from tiledseg.planning.answer.stages import ask_stages, parse_counts, parse_modes
from tiledseg.planning.answer.table import parse_sections, table
from tiledseg.planning.cost_model.machine import Machine, parse_bandwidth, parse_flops, parse_latency
from tiledseg.planning.jobs.job import Site, batch_script, find_site, parse_minutes, planned_job, searched_job
from tiledseg.planning.question import Question, check_exact
from tiledseg.planning.run.spread import Parallelism
from tiledseg.system.outputs import check_ending, check_outputs, whole
from tiledseg.system.writing import replacing
from tiledseg.units import parse_bytes

_SEARCHED = (
    "mesh", "stages", "balance", "micro_batches", "schedule", "recompute", "halo", "memory_budget", "window",
)  # fmt: skip
_MODEL_FLAGS = ("levels", "convs_per_level", "kernel", "base_channels", "padding", "norm", "upsampling", "encoder")


class Answered(NamedTuple):
    """An answer as plain values, and what makes its text: a table, or a batch script."""

    part: dict[str, Any]
    text: Callable[[], str]


def answered(flags: Namespace) -> Answered:
    """Make the plan that the flags ask for, and draw its picture. Raises ConfigError, OutputError."""
    other = flags.scaling or flags.emit or (flags.search and "--search") or (flags.format == "json" and "--format json")
    if flags.show is not None and other:
        raise ConfigError(f"--show is {flags.show}, but only the plan's table has sections; leave it out")
    if flags.csv is not None and flags.scaling is None:
        raise ConfigError(f"--csv is {flags.csv}, but --scaling is not given; leave it out")
    if flags.scaling is not None:
        return _scaling(flags)
    if flags.search:
        return _search(flags)
    if flags.images_per_step is not None:
        raise ConfigError(f"--images-per-step is {flags.images_per_step}, but --search is not given; leave it out")
    shown = () if flags.show is None else parse_sections(flags.show)
    question = _question(flags)
    emit = _emitted(flags)
    if flags.plot is not None:
        _check_plot(flags.plot)
    planned = plan(question, _stages(flags))
    if flags.plot is not None:
        _plot(flags.plot, question, planned)
    return Answered(planned.answer, lambda: emit(question, planned) if emit else table(question, planned.answer, shown))


def _search(flags: Namespace) -> Answered:
    """Answer --search: the best settings, or the batch script of the winner."""
    from tiledseg.planning.answer.search import search_part, search_table, searchable, searched

    images = _images_per_step(flags, "--search")
    job = _job_asked(flags)
    question = searchable(_question(flags), _grid(flags.grid) if flags.grid else None)
    found = searched(question, images)
    part = search_part(question, images, found)
    if job is not None:
        script = batch_script(job[0], searched_job(question, images, found.winner, *job))
        return Answered({"search": part}, lambda: script)
    return Answered({"search": part}, lambda: search_table(part))


def _emitted(flags: Namespace) -> Callable[[Question, Planned], str] | None:
    """Return a function that writes the batch script, if one is wanted."""
    job = _job_asked(flags)
    if job is None:
        return None
    return lambda question, planned: batch_script(job[0], planned_job(question, planned, *job, flags.halo))


def _images_per_step(flags: Namespace, word: str) -> int:
    """Return the images of a step of a search or a scaling study. Raise ConfigError for flags of what it decides."""
    for name in (*_SEARCHED, *(["plot"] if flags.scaling is None else [])):
        if getattr(flags, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is {getattr(flags, name)}, but {word} finds settings; leave {flag} or it out")
    check_exact(flags.stride, {word: "given"})
    images = 1 if flags.images_per_step is None else flags.images_per_step
    Range(1, MOST).check("--images-per-step", images)
    if images > flags.images:
        raise ConfigError(f"--images-per-step is {images}, but --images is {flags.images}; give at most so many")
    return images


def _scaling(flags: Namespace) -> Answered:
    """Answer --scaling: the time over the number of GPUs."""
    from tiledseg.planning.answer.search import scaling_csv, scaling_part, scaling_table, scaling_title, searchable
    from tiledseg.planning.search.best import parse_range

    numbers, images = parse_range(flags.scaling), _images_per_step(flags, "--scaling")
    for name in ("search", "gpus", "emit", "site", "time"):
        if getattr(flags, name):
            raise ConfigError(f"--{name} is given, but --scaling has GPUs of its own and no job; leave one of them out")
    plotter = None if flags.plot is None else _plotter()
    if flags.plot is not None:
        _check_plot(flags.plot)
    if flags.csv is not None:
        check_ending("--csv", flags.csv, ".csv")
    outputs = {"--csv": flags.csv, "--plot": flags.plot}
    check_outputs([whole(flag, path) for flag, path in outputs.items() if path is not None])
    question = replace(_question(flags), gpus=numbers[-1])
    part = scaling_part(searchable(question, _grid(flags.grid) if flags.grid else None), images, numbers)
    if flags.csv is not None:
        with replacing(flags.csv) as path:
            path.write_text(scaling_csv(part), encoding="utf-8")
    if plotter is not None:
        plotter.write(flags.plot, plotter.draw_scaling(part, scaling_title(question, images, numbers)))
    return Answered({"scaling": part}, lambda: scaling_table(part))


def _job_asked(flags: Namespace) -> tuple[Site, int] | None:
    """Return the site of the batch script, and its minutes, if one is wanted."""
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
    return site, minutes


def _check_plot(path: str) -> None:
    check_ending("--plot", path, ".png")
    check_outputs([whole("--plot", path)])


def _plot(path: str, question: Question, planned: Planned) -> None:
    if planned.tiling is None:
        raise ConfigError(f"--plot draws exact tiles, but --stride is {question.stride}; leave one of them out")
    plotter = _plotter()
    plotter.write(path, plotter.draw(question, planned.tiling, planned.pipeline))


def _plotter() -> ModuleType:
    """Return the module that draws, imported late: matplotlib is slow to import, and an extra."""
    try:
        return import_module("tiledseg.planning.answer.plot")
    except ModuleNotFoundError as error:
        raise ConfigError(f"--plot needs {error.name}, which is not installed: {install('plot')}") from None


def _network(flags: Namespace) -> Network:
    network = build_network(_model(flags), flags.bands, flags.classes)
    if flags.build is None:
        return network
    from tiledseg.tracing.build import known  # torch, and the code of the network's author

    return known(network)


def _question(flags: Namespace) -> Question:
    machine = _machine(flags)
    memory = machine.memory if flags.gpu_memory is None else parse_bytes(flags.gpu_memory)
    fits_alone = memory is not None and flags.stride == 1 and flags.mesh is None and flags.stages is None
    return Question(
        size=_two("--size", flags.size),
        network=_network(flags),
        grid=_grid(flags.grid or ["auto" if fits_alone else "8"]),
        stride=flags.stride,
        precision=flags.precision,
        gpu_memory=memory,
        memory_budget=None if flags.memory_budget is None else parse_bytes(flags.memory_budget),
        gpus_per_node=flags.gpus_per_node,
        images=flags.images,
        gpus=flags.gpus,
        mesh=None if flags.mesh is None else _two("--mesh", flags.mesh),
        machine=machine,
        window=flags.window,
        recompute=flags.recompute if flags.recompute in NODES else "auto",
    )


def _stages(flags: Namespace) -> Parallelism | None:
    parts = {key: getattr(flags, key) for key in ("balance", "micro_batches", "schedule", "recompute")}
    if flags.recompute in NODES:
        del parts["recompute"]
    given = {key: value for key, value in parts.items() if value is not None}
    if flags.stages is None:
        if given:
            flag = next(iter(given)).replace("_", "-")
            raise ConfigError(f"--{flag} is {next(iter(given.values()))}, but --stages is not given; give --stages N")
        return None
    check_exact(flags.stride, {"--stages": flags.stages})
    if "balance" in given:
        given["balance"] = parse_counts(given["balance"])
    if "recompute" in given:
        given["recompute"] = parse_modes(given["recompute"])
    return ask_stages(flags.stages, **given)


def _machine(flags: Namespace) -> Machine:
    parsers = {"flops": parse_flops, "bandwidth": parse_bandwidth, "latency": parse_latency}
    given = {key: parse(getattr(flags, key)) for key, parse in parsers.items() if getattr(flags, key) is not None}
    check_exact(flags.stride, {f"--{key}": getattr(flags, key) for key in ("machine", *parsers)})
    if flags.machine is None:
        return replace(Machine(), **given)  # type: ignore[arg-type]  # three of its figures
    from tiledseg.user_files.machine import find_machine  # YAML, which few plans read

    machine = find_machine(flags.machine).with_figures(**given)
    most, given_gpus = machine.ranks_per_host, flags.gpus_per_node or machine.ranks_per_host
    if given_gpus > most:
        raise ConfigError(
            f"--gpus-per-node is {given_gpus}, but nodes of --machine {flags.machine} have {most} GPUs; give at most "
            f"{most}, or a profile with host.ranks"
        )
    return replace(machine, ranks_per_host=given_gpus)


def _model(flags: Namespace) -> ModelConfig:
    given = {key: getattr(flags, key) for key in _MODEL_FLAGS if getattr(flags, key) is not None}
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
