"""Which rank this process is, read from the variables that its launcher set. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tiledseg.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """Place of one process in the job. `launcher`: serial, torchrun, jsrun, openmpi, pmi, slurm or torch."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str

    def __post_init__(self) -> None:
        """Raise ConfigError where the four numbers contradict each other."""
        for rank, size, kind in ((self.rank, self.size, "rank"), (self.local_rank, self.local_size, "local rank")):
            if not 0 <= rank < size:
                raise ConfigError(
                    f"{self.launcher} gave {kind} {rank} of {size}: ranks count from 0; unset stale launcher variables"
                )
        if self.local_size > self.size:
            raise ConfigError(
                f"{self.launcher} gave {self.local_size} ranks on this node but {self.size} in the job: "
                "unset stale launcher variables"
            )

    @property
    def is_root(self) -> bool:
        return self.rank == 0

    @property
    def one_node(self) -> bool:
        return self.local_size == self.size


SERIAL = Launch(rank=0, size=1, local_rank=0, local_size=1, launcher="serial")

# Launchers in the order of their detection, the innermost first. torchrun may run inside srun or jsrun; jsrun starts
# Spectrum MPI, which sets Open MPI's names too; mpirun inside a Slurm allocation keeps Slurm's. The four names of a
# line come from one launcher, so rank and local rank never have two sources.
_PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_PMI = ("PMI_RANK", "PMI_SIZE")
_LAUNCHERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    ("jsrun", tuple(f"JSM_NAMESPACE_{name}" for name in _PLACE)),
    ("openmpi", tuple(f"OMPI_COMM_WORLD_{name}" for name in _PLACE)),
    ("pmi", (*_PMI, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),  # Hydra: MPICH, Intel MPI
    ("pmi", (*_PMI, "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")),  # PALS: HPE Cray
)
_SLURM_NAMES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE")


def detect(environ: Mapping[str, str]) -> Launch:
    """Return the place of this process from its environment: a single rank if no launcher has set its variables.

    Pure. Raises ConfigError if a launcher's variables are half set or contradict each other.
    """
    for launcher, names in _LAUNCHERS:
        if any(name in environ for name in names if name not in _PMI):
            rank, size, local_rank, local_size = (_number(environ, name, launcher, names) for name in names)
            return Launch(rank, size, local_rank, local_size, launcher)
    # Slurm's step variables exist only in a task that srun started; a batch script has SLURM_PROCID=0, but no step.
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        return _detect_slurm(environ)
    if any(name in environ for name in _PMI):  # srun --mpi=pmi2 sets these too, beside its own
        raise ConfigError(
            f"PMI_RANK={environ.get('PMI_RANK')} PMI_SIZE={environ.get('PMI_SIZE')} but no local rank "
            "(MPI_LOCALRANKID or PMI_LOCAL_RANK): start with mpirun, srun or torchrun, or unset both"
        )
    return SERIAL


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: 'n[01-03,7],login' -> n01. Raises ConfigError."""
    name = re.sub(r"\[(\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*\]", r"\1", nodes).split(",")[0]
    if not name or set(name) & set("[]"):
        raise ConfigError(f"Slurm's node list {nodes!r} has no first host: set MASTER_ADDR and MASTER_PORT instead")
    return name


def _detect_slurm(environ: Mapping[str, str]) -> Launch:
    rank, size, local_rank, node = (_number(environ, name, "slurm", _SLURM_NAMES) for name in _SLURM_NAMES[:4])
    tasks_per_node = _text(environ, "SLURM_STEP_TASKS_PER_NODE", "slurm", _SLURM_NAMES)
    counts: list[int] = []
    for piece in tasks_per_node.split(","):  # run lengths: '2(x3),1' -> [2, 2, 2, 1]
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece.strip())
        if not found:
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE={tasks_per_node} is not of the form 2(x3),1: unset it or use mpirun"
            )
        counts.extend([int(found[1])] * int(found[2] or 1))
    if node >= len(counts):
        raise ConfigError(f"SLURM_NODEID={node} but SLURM_STEP_TASKS_PER_NODE={tasks_per_node}: unset stale variables")
    return Launch(rank, size, local_rank, counts[node], "slurm")


def _text(environ: Mapping[str, str], name: str, launcher: str, names: tuple[str, ...]) -> str:
    if name not in environ:
        there = ", ".join(f"{other}={environ[other]}" for other in names if other in environ)
        raise ConfigError(
            f"{launcher} variables are half set: {there} but no {name}; start with one launcher, or unset them"
        )
    return environ[name]


def _number(environ: Mapping[str, str], name: str, launcher: str, names: tuple[str, ...]) -> int:
    text = _text(environ, name, launcher, names)
    if not re.fullmatch(r"\d+", text):
        raise ConfigError(f"{name}={text!r} is not a whole number: start with one launcher, or unset {name}")
    return int(text)


_FILES = 64  # open files for images, reading threads, the run's files, libraries
_GROUPS = 4  # groups of a rank: the whole job, its image, its stage, its pipeline


def open_files_needed(size: int, keeps_store: bool, peers: int = 0) -> int:
    """Return the number of open files of one of `size` ranks, which sends messages to `peers` others.

    Gloo connects two ranks at their first message. Its sums and gathers are rings, its broadcasts trees: a few
    connections for each doubling of the ranks. `keeps_store`: each rank connects to this one twice (job and watch).
    """
    ring_and_trees = 2 + 2 * (size - 1).bit_length()
    return _FILES + _GROUPS * ring_and_trees + peers + (2 * size if keeps_store else 0)
