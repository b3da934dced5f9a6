"""The job that a plan starts: how many ranks on how many nodes, and the keys by which `train` does what was planned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tiledseg.errors import ConfigError
from tiledseg.planning.answer.report import Planned
from tiledseg.planning.jobs.script import Job, Site
from tiledseg.planning.question import Question
from tiledseg.planning.stages.staged_pipeline import StagedPipeline
from tiledseg.system.console import counted

if TYPE_CHECKING:
    from tiledseg.planning.search.price import Priced


def planned_job(question: Question, planned: Planned, site: Site, minutes: int, halo: str | None = None) -> Job:
    """Return the job of the pipelines, or of a halo mode: `halo`, or the one that the plan chose.

    It takes as many of the given GPUs (by default one for each tile) as share images, or pipelines, evenly and fill
    nodes. Raises ConfigError where no mode was chosen, or GPUs do not suffice for one image.
    """
    if planned.tiling is None:
        raise ConfigError(f"--emit writes a job of exact tiles, but --stride is {question.stride}; leave one out")
    grid = planned.tiling.grid
    per_node, gpus = _node_gpus(question, site), question.gpus or math.prod(grid)
    flags = [f"--tiling.grid {_shell_word(grid)}", *_precision(question)]
    if question.memory_budget is not None:
        flags.append(f"--memory.budget {question.memory_budget}")
    if question.recompute != "auto":
        flags.append(f"--memory.recompute {question.recompute}")
    if planned.pipeline is None:
        ranks, more, what = _mode(planned.answer["modes"], halo, gpus, per_node)
    elif halo in (None, "read"):
        ranks, more, what = _pipelines(planned.pipeline, gpus, per_node)
    else:
        raise ConfigError(f"--halo is {halo}, but the plan of --stages is in mode read; leave one of them out")
    return _job(ranks, question, site, minutes, [*flags, *more], f": {grid[0]} x {grid[1]} tiles an image, {what}.")


def searched_job(question: Question, images_per_step: int, priced: Priced, site: Site, minutes: int) -> Job:
    """Return the job of the winner of a search, on the GPUs that it keeps busy."""
    from tiledseg.planning.answer.search import memory_keys

    candidate = priced.candidate
    flags = [f"--tiling.grid {_shell_word(candidate.grid)}"]
    flags += [f"--parallel.{key} {_shell_word(value)}" for key, value in candidate.keys(priced.plan).items()]
    flags += _precision(question)
    kept = memory_keys(question, priced)
    flags += [f"--memory.{key} {_shell_word(value)}" for key, value in kept.items()]
    flags += ['--memory.store "$local"'] if kept and "store" not in kept else []
    if priced.plan.rebuilt is not None:
        flags.append(f"--memory.budget {priced.limit}")
    flags += ["--train.tiles_per_step null", f"--train.images_per_step {images_per_step}"]
    what = f", {images_per_step} images a step: {priced.in_words}."
    return _job(priced.ranks, question, site, minutes, flags, what)


def _job(ranks: int, question: Question, site: Site, minutes: int, flags: Sequence[str], what: str) -> Job:
    """Return the job of so many ranks, no more and no fewer: nodes have as many each, at most their GPUs."""
    most = min(_node_gpus(question, site), ranks)
    per_node = next(each for each in range(most, 0, -1) if ranks % each == 0)
    nodes = ranks // per_node
    title = f"Trains on {ranks} GPUs, {counted(nodes, 'node')} of {per_node}{what}"
    return Job(nodes, per_node, minutes, tuple(flags), title)


def _node_gpus(question: Question, site: Site) -> int:
    """Return the GPUs of a node: as set, of the site, or of the machine."""
    return question.gpus_per_node or site.gpus or question.node_gpus


def _precision(question: Question) -> list[str]:
    return [f"--train.precision {question.precision}"] if question.precision != "fp32" else []


def _mode(modes: Mapping[str, Any], halo: str | None, gpus: int, per_node: int) -> tuple[int, list[str], str]:
    """Return ranks, flags and a description of a run in that mode, or the one that was chosen."""
    chosen, image = modes["choice"], modes["ranks"]
    mode, fusion = (halo, 1) if halo not in (None, chosen["mode"]) else (chosen["mode"], chosen["fusion"])
    if mode is None:
        raise ConfigError(f"--emit needs a halo mode that fits, but {chosen['reason']}")
    row = next(row for row in modes["costs"] if row["mode"] == mode)
    if not row["possible"]:
        raise ConfigError(f"--halo is {mode}, but {row['reason']}")
    if not row["exact"]:
        raise ConfigError(
            f"--halo is {mode}, which is not exact here; leave it out, and the plan chooses a mode that is"
        )
    if mode == "read":
        ranks = _full(gpus, 1, per_node)
        return ranks, [f"--train.tiles_per_step {ranks}"], "one a GPU"
    ranks = _full(gpus, image, per_node)
    flags = [f"--parallel.halo {mode}", f"--parallel.mesh {_shell_word(modes['mesh'])}"]
    flags += [f"--parallel.fusion {fusion}"] if fusion not in (None, 1) else []
    flags += ["--train.tiles_per_step null", f"--train.images_per_step {ranks // image}"]
    return ranks, flags, f"{image} GPUs share one in mode {mode}"


def _pipelines(pipeline: StagedPipeline, gpus: int, per_node: int) -> tuple[int, list[str], str]:
    """Return ranks, flags and a description of a run in pipelines."""
    case = pipeline.case
    ranks = _full(gpus, case.stages, per_node)
    flags = [
        f"--parallel.stages {case.stages}",
        f"--parallel.schedule {case.schedule}",
        f"--parallel.balance {_shell_word(pipeline.balance)}",
        f"--parallel.recompute {case.modes[0] if len(set(case.modes)) == 1 else _shell_word(case.modes)}",
        f"--parallel.micro_batches {case.micro_batches}",
        f"--train.tiles_per_step {ranks // case.stages * case.micro_batches}",
    ]
    return ranks, flags, f"{ranks // case.stages} pipelines of {case.stages} stages"


def _full(gpus: int, group: int, per_node: int) -> int:
    """Return the most ranks in groups of that size that fill nodes; those of less than a node as they are."""
    together = math.lcm(group, per_node) if gpus > per_node else group
    ranks = gpus // together * together
    if ranks:
        return ranks
    raise ConfigError(
        f"--gpus is {gpus}, but groups of {group} ranks on full nodes of {per_node} take {together} at least; give "
        "that many"
    )


def _shell_word(value: Any) -> str:
    """Return a flag's value as a shell takes it: brackets are the shell's."""
    return f"'[{','.join(map(str, value))}]'" if isinstance(value, list | tuple) else str(value)
