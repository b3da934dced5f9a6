"""Batch scripts: the machines that they are written for, and the text of a script.

The facts of a machine (nodes, local disks, launchers) are those of its documentation. Nothing here was measured, and no
job of ours has run on a machine with a name: on one node of Slurm's own and under stand-ins of LSF's commands only
(`tests/test_jobs.py`). Sources: the user guides of OLCF (Summit, Frontier) and NERSC (Perlmutter), and the manuals of
Slurm and LSF. A script is the batch system's template with a site's and a job's words in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files

from tiledseg.errors import ConfigError

SYSTEMS = ("slurm", "lsf")
_MOST_MINUTES = 7 * 24 * 60
_OWN_FOLDER = "/tmp/$(id -un)-tiledseg"


@dataclass(frozen=True)
class Site:
    """A machine under `system`. `gpus` and `cores`: of a node, and of each GPU's rank; None where a plan must say.

    `local`: a folder that each node has for itself. `directives`: lines of the batch system besides those of every
    script. `exports`: variables of every rank. `launcher`: what starts ranks where `TILEDSEG_LAUNCHER` does not say.
    """

    name: str
    system: str
    launcher: str
    local: str
    cores: int
    gpus: int | None = None
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
    Site("frontier", "slurm", "srun", "/mnt/bb/$(id -un)", 7, 8, ("--constraint=nvme",), _FRONTIER),
    # 4 A100 a node, and 128 threads of 64 cores; /tmp is memory.
    Site("perlmutter", "slurm", "srun", _OWN_FOLDER, 32, 4, _PERLMUTTER, ("NCCL_SOCKET_IFNAME=hsn",)),
    Site("generic", "lsf", "mpirun", _OWN_FOLDER, 7),
    # 6 V100 and 42 cores a node.
    Site("summit", "lsf", "jsrun", "/mnt/bb/$(id -un)", 7, 6, ('-alloc_flags "smt1 nvme"',)),
)


def find_site(system: str, name: str) -> Site:
    """Return the site. Raises ConfigError for a machine that is not known under that batch system."""
    sites = {site.name: site for site in _SITES if site.system == system}
    if name not in sites:
        raise ConfigError(f"--site is '{name}', but --emit {system} knows {', '.join(sites)}; give one of them")
    return sites[name]


@dataclass(frozen=True)
class Job:
    """Ranks on `nodes` with `per_node` each, minutes, flags of `train`, and a line that says what they do."""

    nodes: int
    per_node: int
    minutes: int
    flags: tuple[str, ...]
    title: str


# The words of the batch systems, for the part that all scripts have (`run.sh`).
_SLURM = {
    "directive": "#SBATCH",
    "job": "SLURM_JOB_ID",
    "task": "SLURM_ARRAY_TASK_ID",
    "array": "--array=1-N",
    "signal": "USR1",
    "stopping": """\
# USR1 comes to this shell before the job's end, and goes on to the ranks: they write a checkpoint and leave with 75.
# TERM (scancel) does the same, but then nothing is submitted again.""",
}
_LSF = {
    "directive": "#BSUB",
    "job": "LSB_JOBID",
    "task": "LSB_JOBINDEX",
    "array": '-J "tiledseg[1-N]"',
    "signal": "USR2",
    "stopping": """\
# USR2 comes five minutes before the job's end, and goes on to the ranks: they write a checkpoint and leave with 75, at
# which LSF submits the job again (-Q 75). After TERM (bkill) it does not.""",
}

# The variables that Open MPI's mpirun hands to ranks on other nodes only if named.
_HANDED_ON = "PATH LD_LIBRARY_PATH PYTHONPATH OMP_NUM_THREADS TILEDSEG_END_TIME"


def batch_script(site: Site, job: Job) -> str:
    """Return a script for `sbatch` or `bsub`, ready to run: `jobs/` has those of the paper's setting."""
    names = {"slurm": _SLURM, "lsf": _LSF}[site.system]
    hours, minutes = divmod(job.minutes, 60)
    words = names | {
        "title": job.title,
        "nodes": str(job.nodes),
        "per_node": str(job.per_node),
        "cores": str(site.cores),
        "minutes": str(job.minutes),
        "time": f"{hours:02}:{minutes:02}:00" if site.system == "slurm" else f"{hours}:{minutes:02}",
        "local": site.local,
        "launcher": site.launcher,
        "flags": "\n".join(f"    {each}" for each in job.flags),
        "directives": "\n".join(f"{names['directive']} {each}" for each in site.directives),
        "exports": "\n".join(f"export {each}" for each in site.exports),
        "handed_on": " ".join([_HANDED_ON, *(each.split("=")[0] for each in site.exports)]),
    }
    text = _template(site.system).replace("@run@\n", _template("run"))
    if site.system == "lsf":
        text = text.replace("@launch@\n", _template(f"lsf-{site.launcher}"))
        lines = [f"-n {job.nodes * job.per_node}", f'-R "span[ptile={job.per_node}]"', f'-gpu "num={job.per_node}"']
        lines = [f"-nnodes {job.nodes}"] if site.launcher == "jsrun" else lines
        words["nodes_directive"] = "\n".join(f"#BSUB {line}" for line in lines)
    for name, value in words.items():
        text = text.replace(f"@{name}@", value)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip()


def _template(name: str) -> str:
    return files("tiledseg.planning.jobs").joinpath(f"{name}.sh").read_text(encoding="utf-8")


def parse_minutes(text: str) -> int:
    """Parse '2:00' (hours, minutes), at most seven days, into minutes. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(\d{1,3}):([0-5]\d)", text)
    minutes = int(match[1]) * 60 + int(match[2]) if match else 0
    if not 10 <= minutes <= _MOST_MINUTES:
        raise ConfigError(f"--time is '{text}'; give hours and minutes from 0:10 to {_MOST_MINUTES // 60}:00, 2:00 say")
    return minutes
