"""The job that a plan starts: how many ranks on how many nodes, the keys of `train`, and its batch script.

The facts of a machine (nodes, local disks, launchers) are those of its documentation; nothing here was measured. Jobs
have run on one node of Slurm, and under stand-ins of LSF's commands (`tests/test_job_runs.py`), but on no named
machine. Sources: the user guides of OLCF (Summit, Frontier) and NERSC (Perlmutter), and manuals of Slurm and LSF. A
script is the batch system's template, filled with the words of a site and of a job.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from tiledseg.errors import ConfigError
from tiledseg.planning.answer.modes import ModePlans
from tiledseg.planning.answer.report import Planned
from tiledseg.planning.answer.text import DEFAULTS, PlannedStep, machine_words, network_text, slow_precision, step_of
from tiledseg.planning.run.plan import RunPlan, plan_run
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.run.spread import Parallelism
from tiledseg.planning.walk.mode_cost import fusion_word
from tiledseg.system.console import counted, say

if TYPE_CHECKING:
    from tiledseg.planning.search import Priced

_WIDTH = 80  # columns of a script
_MOST_MINUTES = 7 * 24 * 60
_OWN_FOLDER = "/tmp/$(id -un)-tiledseg"


@dataclass(frozen=True)
class Site:
    """A machine with the batch `system`. `cores`: of a rank, which has one GPU. `machine`: the name of its profile, if
    it has one.

    `local`: a folder of each node's own. `directives`: lines of the batch system besides those of every script.
    `exports`: variables of every rank. `launcher`: the program that starts ranks, unless `TILEDSEG_LAUNCHER` names one.
    """

    name: str
    system: str
    launcher: str
    local: str
    cores: int
    machine: str | None = None
    directives: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()


_FRONTIER = (
    "NCCL_SOCKET_IFNAME=hsn0",
    'MIOPEN_USER_DB_PATH="/tmp/miopen-$SLURM_JOB_ID"',  # not on the file system that all ranks share
    'MIOPEN_CUSTOM_CACHE_DIR="/tmp/miopen-$SLURM_JOB_ID"',
)
_PERLMUTTER = ("--constraint=gpu", "--qos=regular")
_SITES = (
    Site("generic", "slurm", "srun", _OWN_FOLDER, 7),
    # 8 halves of 4 MI250X a node; 56 of 64 cores, since the system keeps the first of each group of 8.
    Site("frontier", "slurm", "srun", "/mnt/bb/$(id -un)", 7, "frontier", ("--constraint=nvme",), _FRONTIER),
    # 4 A100 a node, and 128 threads of 64 cores; /tmp is memory.
    Site("perlmutter", "slurm", "srun", _OWN_FOLDER, 32, "perlmutter", _PERLMUTTER, ("NCCL_SOCKET_IFNAME=hsn",)),
    Site("generic", "lsf", "mpirun", _OWN_FOLDER, 7),
    # 6 V100 and 42 cores a node.
    Site("summit", "lsf", "jsrun", "/mnt/bb/$(id -un)", 7, "summit", ('-alloc_flags "smt1 nvme"',)),
)


def find_site(system: str, name: str) -> Site:
    """Return the site of that name. Raises ConfigError for one that is not known under that batch system."""
    sites = {site.name: site for site in _SITES if site.system == system}
    if name not in sites:
        raise ConfigError(f"--site is '{name}', but --emit {system} knows {', '.join(sites)}; give one of them")
    return sites[name]


def planned_script(
    site: Site, minutes: int, question: RunQuestion, planned: Planned, budget: int | None, halo: str | None
) -> str:
    """Return the script of a plan: of its pipelines, of the mode `halo`, or of the mode that the plan chose. `budget`:
    bytes of a step.

    The ranks are at most the GPUs of the question, by default one for each tile. They fill nodes, and share images or
    pipelines evenly. Raises ConfigError where no mode was chosen, or where the GPUs do not suffice for one image.
    """
    assert planned.tiling is not None, "the command refuses other strides"
    assert planned.modes is not None, "a tiling has modes"
    grid = planned.tiling.grid
    gpus, node_gpus = question.ranks or math.prod(grid), question.figures.ranks_per_host
    keys = {"tiling.grid": grid, **_precision_key(question), "memory.budget": budget}
    keys["memory.recompute"] = None if question.recompute == "auto" else question.recompute
    if planned.pipeline is None or planned.step is None:
        plan = _plan_of(planned.modes, halo)
        ranks, more, words = _mode_keys(planned.modes, plan, question.images_per_step, gpus, node_gpus)
        if "train.images_per_step" in more and plan.cost.mode == "read":  # fewer ranks have more tiles each
            plan = plan_run(replace(planned.modes.question, ranks=ranks, parallel=Parallelism(exact=False)))
        step = step_of(planned.modes.question, plan)
    elif halo in (None, "read"):
        case, step = planned.pipeline.case, planned.step
        ranks = _full_nodes(gpus, case.stages, node_gpus)
        more = {
            "parallel.halo": "read",
            "parallel.stages": case.stages,
            "parallel.schedule": case.schedule,
            "parallel.balance": planned.pipeline.balance,
            "parallel.recompute": case.modes[0] if len(set(case.modes)) == 1 else case.modes,
            "parallel.micro_batches": case.micro_batches,
            "train.tiles_per_step": ranks // case.stages * case.micro_batches,
        }
        words = f"{ranks // case.stages} pipelines of {case.stages} stages"
    else:
        raise ConfigError(f"--halo is {halo}, but the plan of --stages is in mode read; leave one of them out")
    flags = [*_flags({key: value for key, value in keys.items() if value is not None}), *_flags(more)]
    words = f": {grid[0]} x {grid[1]} tiles an image, {words}."
    return _script(site, minutes, replace(step, question=question, gpus=ranks), gpus, flags, words)


def searched_script(site: Site, minutes: int, question: RunQuestion, priced: Priced) -> str:
    """Return the script of the winner of a search, on the GPUs that it keeps busy."""
    from tiledseg.planning.answer.search import memory_keys

    memory, images = memory_keys(question, priced), question.images_per_step
    keys: dict[str, Any] = {"tiling.grid": priced.candidate.grid, "parallel.halo": priced.candidate.parallel.halo}
    keys |= {f"parallel.{key}": value for key, value in priced.candidate.keys(priced.plan).items()}
    keys |= _precision_key(question) | {f"memory.{key}": value for key, value in memory.items()}
    keys |= {"memory.store": '"$local"'} if memory and "store" not in memory else {}
    keys |= {} if priced.plan.rebuilt is None else {"memory.budget": question.memory}
    keys |= {"train.tiles_per_step": "null", "train.images_per_step": images}
    words = f", {counted(images, 'image')} a step: {priced.candidate.in_words}."
    may_idle = priced.candidate.parallel.mesh is not None or priced.candidate.parallel.stages > 1
    return _script(site, minutes, step_of(question, priced.plan), question.ranks, _flags(keys), words, may_idle)


def _script(
    site: Site, minutes: int, step: PlannedStep, gpus: int, flags: Sequence[str], words: str, may_idle: bool = False
) -> str:
    """Return a script for `sbatch` or `bsub`, ready to run, and print its warnings: `jobs/` has those of the paper's
    setting. `flags`: of `train`. `words`: about the tiles.

    The ranks of the step are equally many on each node. Where this takes more nodes than `gpus` fill, and ranks
    `may_idle`, nodes are full instead, and the last ranks idle.
    """
    question, ranks = step.question, step.gpus
    node_gpus = question.figures.ranks_per_host
    most = min(node_gpus, ranks)
    per_node = next(each for each in range(most, 0, -1) if ranks % each == 0)
    nodes, idle = ranks // per_node, ""
    if may_idle and nodes > -(-gpus // node_gpus):
        nodes, per_node = -(-ranks // most), most
        idle, flags = f", {nodes * per_node - ranks} of them idle", [*flags, "--parallel.idle_ranks true"]
    network = network_text(question).replace("\n", ", ")
    policy = f"recompute {question.recompute}; " if question.recomputes else "all tensors are kept; "
    about = [
        f"Trains on {ranks} GPUs, {counted(nodes, 'node')} of {per_node}{idle}{words}",
        f"Planned for {network}, {question.precision}: the configuration must have the same.",
        f"Memory: {'' if step.rebuilt and step.rebuilt.items else policy}{step.memory_words}.",
        f"Predicted: a step {step.duration}, an epoch {step.epoch_words()}; {machine_words(question)}.",
    ]
    slow = slow_precision(question)
    warnings = [f"GPUs: {step.gpu_words}."] * (question.ranks > ranks) + [f"Precision: {slow}."] * bool(slow)
    for line in warnings:
        say(f"warning: {line}")
    slurm = site.system == "slurm"
    threads = f"{site.cores} CPUs a rank, of {site.cores * node_gpus} for {node_gpus} GPUs a node"
    if site.machine is None:
        threads += f"; give those of your nodes ({'--cpus-per-task' if slurm else 'TILEDSEG_CORES_PER_GPU'})"
    whole = per_node == node_gpus
    if slurm:
        yours, booked = "--account, --partition", ["--exclusive", "--mem=0"] if whole else []
        shares = "--mem"
    else:
        yours, shares = "-q", f'-R "affinity[core({site.cores})] rusage[mem=...]"'
        booked = [f"-n {nodes * per_node}", f'-R "span[ptile={per_node}]"', f'-gpu "num={per_node}"']
        booked = [f"-nnodes {nodes}"] if site.launcher == "jsrun" else [*booked, *["-x"] * whole]
    yours += f", the modules and the environment of the shell{'' if whole else f', {shares}: nodes are shared'}"
    sizes = f"-n {nodes * per_node} \\\n        --gpus-per-node {per_node}"
    sizes += "" if question.limit is None else f" --gpu-memory {question.limit / 2**30:.12g}GiB"
    shown = textwrap.wrap(re.sub(r'([\\"$`])', r"\\\1", network.removesuffix(DEFAULTS)), 55, break_on_hyphens=False)
    values = {"nodes": str(nodes), "per_node": str(per_node), "minutes": str(minutes)}
    values |= {
        "cores": str(site.cores),
        "local": site.local,
        "time": f"{minutes // 60:02}:{minutes % 60:02}:00" if slurm else f"{minutes // 60}:{minutes % 60:02}",
        "about": "\n".join(_comment(line) for line in (*about, *warnings)),
        "ranks": sizes,
        "network": "\n".join(shown),
        "yours": _comment(f"Yours to give: {yours}."),
        "flags": "\n".join(f"    {each}" for each in flags),
        "directives": "\n".join(f"#{'SBATCH' if slurm else 'BSUB'} {each}" for each in (*booked, *site.directives)),
        "exports": "\n".join(f"export {each}" for each in site.exports),
        "threads": _comment(f"Threads: {threads}."),
    }
    text = _template(site.system, site.launcher)
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip()


def _precision_key(question: RunQuestion) -> dict[str, Any]:
    return {"train.precision": question.precision} if question.precision != "fp32" else {}


def _plan_of(modes: ModePlans, halo: str | None) -> RunPlan:
    """Return the plan in that mode, or in the one that was chosen."""
    if halo is None and (modes.best is None or not modes.fitting):
        raise ConfigError(f"--emit needs a halo mode that fits, but {modes.reason}")
    if halo in modes.impossible:
        raise ConfigError(f"--halo is {halo}, but {modes.impossible[halo]}")
    plan = next((plan for plan in modes.plans if plan.cost.mode == halo), modes.best)
    if plan not in modes.exact or plan is None:
        raise ConfigError(
            f"--halo is {halo}, which is not exact here; leave it out, and the plan chooses a mode that is"
        )
    return plan


def _mode_keys(
    modes: ModePlans, plan: RunPlan, images: int, gpus: int, per_node: int
) -> tuple[int, dict[str, Any], str]:
    """Return ranks, keys and a description of a run by the plan. `images`: of a step, 0 for all that the GPUs take."""
    mode, fusion, mesh = plan.cost.mode, fusion_word(plan.cost.fusion), modes.mesh or modes.tiling.grid
    image = math.prod(mesh)
    ranks = _full_nodes(min(gpus, images * image or gpus), 1 if mode == "read" else image, per_node)
    if mode == "read" and not images:
        return ranks, {"parallel.halo": mode, "train.tiles_per_step": ranks}, "one a GPU"
    keys: dict[str, Any] = {"parallel.halo": mode} | ({} if mode == "read" else {"parallel.mesh": list(mesh)})
    keys |= {"parallel.fusion": fusion} if fusion not in (None, 1) else {}
    keys |= {"train.tiles_per_step": "null", "train.images_per_step": images or ranks // image}
    return ranks, keys, "dealt out" if mode == "read" else f"{image} GPUs share one in mode {mode}"


def _full_nodes(gpus: int, group: int, per_node: int) -> int:
    """Return the most ranks, in groups of that size, that fill nodes; on less than one node only the groups count."""
    unit = math.lcm(group, per_node) if gpus > per_node else group
    ranks = gpus // unit * unit
    if ranks:
        return ranks
    raise ConfigError(
        f"--gpus is {gpus}, but groups of {group} ranks on full nodes of {per_node} take {unit} at least; give "
        "that many, or another --grid"
    )


def _flags(keys: Mapping[str, Any]) -> list[str]:
    """Return keys as flags that a shell takes: brackets are the shell's."""
    lists = {key: f"'[{','.join(map(str, value))}]'" for key, value in keys.items() if isinstance(value, list | tuple)}
    return [f"--{key} {value}" for key, value in {**keys, **lists}.items()]


def _comment(text: str) -> str:
    lines = textwrap.wrap(text, _WIDTH - len("#   "), break_long_words=False, break_on_hyphens=False)
    return "# " + "\n#   ".join(lines)


def _template(name: str, launcher: str) -> str:
    """Return a template with those that it includes, indented as the lines that name them."""
    text = files("tiledseg.planning.jobs").joinpath(f"{name}.sh").read_text(encoding="utf-8")
    text = text.replace("@launcher@", launcher)
    included = re.compile(r"^( *)@include (.+)@\n", re.MULTILINE)
    return included.sub(lambda line: textwrap.indent(_template(line[2], launcher), line[1]), text)


def parse_minutes(text: str) -> int:
    """Parse '2:00' (hours, minutes), at most seven days, into minutes. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(\d{1,3}):([0-5]\d)", text)
    minutes = int(match[1]) * 60 + int(match[2]) if match else 0
    if not 10 <= minutes <= _MOST_MINUTES:
        raise ConfigError(f"--time is '{text}'; give hours and minutes from 0:10 to {_MOST_MINUTES // 60}:00, 2:00 say")
    return minutes
