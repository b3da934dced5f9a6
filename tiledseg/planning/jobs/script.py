"""The text of a batch script: the batch system's template with a site's and a job's words in it."""

from __future__ import annotations

import re
from importlib.resources import files

from tiledseg.errors import ConfigError
from tiledseg.planning.jobs.job import Job
from tiledseg.planning.jobs.site import Site

_MOST_MINUTES = 7 * 24 * 60

# What the batch systems call things, for the part that all scripts have (`run.sh`).
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
_NAMES = {"slurm": _SLURM, "lsf": _LSF}

# What Open MPI's mpirun hands to ranks on other nodes only if told.
_HANDED_ON = "PATH LD_LIBRARY_PATH PYTHONPATH OMP_NUM_THREADS TILEDSEG_END_TIME"


def batch_script(site: Site, job: Job) -> str:
    """A script for `sbatch` or `bsub`, ready to run: `jobs/` has those of the paper's setting."""
    names = _NAMES[site.system]
    words = names | {
        "title": job.title,
        "nodes": str(job.nodes),
        "per_node": str(job.per_node),
        "cores": str(site.cores),
        "minutes": str(job.minutes),
        "time": _time(site.system, job.minutes),
        "local": site.local,
        "launcher": site.launcher,
        "flags": "\n".join(f"    {each}" for each in job.flags),
        "directives": "\n".join(f"{names['directive']} {each}" for each in site.directives),
        "exports": "\n".join(f"export {each}" for each in site.exports),
        "handed_on": " ".join([_HANDED_ON, *(each.split("=")[0] for each in site.exports)]),
    }
    text = _template(site.system).replace("@run@\n", _template("run"))
    if site.system == "lsf":
        words["nodes_directive"] = _lsf_nodes(site, job)
        text = text.replace("@launch@\n", _template(f"lsf-{site.launcher}"))
    for name, value in words.items():
        text = text.replace(f"@{name}@", value)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip()


def _template(name: str) -> str:
    return files("tiledseg.planning.jobs").joinpath(f"{name}.sh").read_text(encoding="utf-8")


def _lsf_nodes(site: Site, job: Job) -> str:
    if site.launcher == "jsrun":
        return f"#BSUB -nnodes {job.nodes}"
    lines = (f"-n {job.nodes * job.per_node}", f'-R "span[ptile={job.per_node}]"', f'-gpu "num={job.per_node}"')
    return "\n".join(f"#BSUB {line}" for line in lines)


def _time(system: str, minutes: int) -> str:
    hours, rest = divmod(minutes, 60)
    return f"{hours:02}:{rest:02}:00" if system == "slurm" else f"{hours}:{rest:02}"


def parse_minutes(text: str) -> int:
    """Minutes of '2:00' (hours, minutes), at most seven days. Raises ConfigError for anything else."""
    found = re.fullmatch(r"(\d{1,3}):([0-5]\d)", text)
    minutes = int(found[1]) * 60 + int(found[2]) if found else 0
    if not 10 <= minutes <= _MOST_MINUTES:
        raise ConfigError(f"--time is '{text}'; give hours and minutes from 0:10 to {_MOST_MINUTES // 60}:00, 2:00 say")
    return minutes
