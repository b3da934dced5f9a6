"""Rank and local rank always come from one launcher, and a half-set environment is an error with its values."""

import resource
from types import SimpleNamespace

import pytest

from tests.answers import refusal
from tiledseg.comm.launch import SERIAL, Launch, detect, first_host
from tiledseg.comm.session import check_open_files, check_threads
from tiledseg.errors import ConfigError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
PLACES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
JSRUN = dict(zip((f"JSM_NAMESPACE_{name}" for name in PLACES), ("7", "12", "1", "6"), strict=True))
OPENMPI = dict(zip((f"OMPI_COMM_WORLD_{name}" for name in PLACES), ("3", "4", "1", "2"), strict=True))
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "6", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}
PALS = {"PMI_RANK": "2", "PMI_SIZE": "6", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "3"}
SLURM_STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
# What a batch script itself sees: PROCID and NTASKS, but no step of several tasks.
SLURM_BATCH = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "4",
}
# Open MPI starts its daemons with srun, one a node, and their variables are handed on to the ranks.
MPIRUN_IN_SLURM = {**SLURM_STEP, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", **OPENMPI}

CASES = [
    ("nothing", {}, SERIAL),
    ("torchrun", TORCHRUN, Launch(5, 8, 1, 4, "torchrun")),
    ("jsrun", JSRUN, Launch(7, 12, 1, 6, "jsrun")),
    ("jsrun sets Open MPI's names too", {**JSRUN, **OPENMPI}, Launch(7, 12, 1, 6, "jsrun")),
    ("mpirun of Open MPI", OPENMPI, Launch(3, 4, 1, 2, "openmpi")),
    ("mpirun in a Slurm allocation", MPIRUN_IN_SLURM, Launch(3, 4, 1, 2, "openmpi")),
    ("Hydra", HYDRA, Launch(2, 6, 0, 3, "pmi")),
    ("Hydra in a Slurm allocation", {**SLURM_STEP, **HYDRA}, Launch(2, 6, 0, 3, "pmi")),
    ("PALS", PALS, Launch(2, 6, 1, 3, "pmi")),
    ("srun", SLURM_STEP, Launch(4, 5, 0, 1, "slurm")),
    ("srun --mpi=pmi2", {**SLURM_STEP, "PMI_RANK": "4", "PMI_SIZE": "5"}, Launch(4, 5, 0, 1, "slurm")),
    ("torchrun in srun", {**SLURM_STEP, **TORCHRUN}, Launch(5, 8, 1, 4, "torchrun")),
    ("torchrun in mpirun", {**MPIRUN_IN_SLURM, **TORCHRUN}, Launch(5, 8, 1, 4, "torchrun")),
    ("a batch script", SLURM_BATCH, SERIAL),
    ("salloc", {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4"}, SERIAL),
    ("rendezvous variables alone", {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, SERIAL),
]


@pytest.mark.parametrize(("environ", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_detect(environ: dict[str, str], expected: Launch) -> None:
    assert detect(environ) == expected


@pytest.mark.parametrize("environ", [TORCHRUN, JSRUN, OPENMPI, HYDRA, PALS, SLURM_STEP])
def test_half_set_variables_are_an_error(environ: dict[str, str]) -> None:
    """Without any one of a launcher's names: an error that shows the others, or (Slurm) no step at all; never a mix."""
    for name in environ:
        rest = {key: value for key, value in environ.items() if key != name}
        if name in ("SLURM_JOB_ID", "SLURM_NTASKS"):
            assert detect(rest) == detect(environ)
        elif name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
            assert detect(rest) == SERIAL
        else:
            with refusal(ConfigError, name):
                detect(rest)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**TORCHRUN, "RANK": "8"}, "8 of 8"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "4 of 4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "9 ranks on this node but 8"),
        ({**TORCHRUN, "RANK": "-1"}, "-1"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "four"),
        ({**TORCHRUN, "WORLD_SIZE": "0", "RANK": "0"}, "0 of 0"),
        ({"PMI_RANK": "2", "PMI_SIZE": "6"}, "PMI_RANK=2 PMI_SIZE=6 but no local rank"),
        ({**SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE": "2,x"}, r"=2,x is not of the form 2\(x3\),1"),
        ({**SLURM_STEP, "SLURM_NODEID": "3"}, r"SLURM_NODEID=3 but SLURM_STEP_TASKS_PER_NODE=2\(x2\),1"),
    ],
)
def test_contradictions_name_both_values(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        detect(environ)


def test_first_hosts_of_node_lists() -> None:
    lists = {"vm": "vm", "n[01-03,7],login": "n01", "r[1-2]n[09-10]": "r1n09", "a-1,b-2.example.org": "a-1"}
    assert {nodes: first_host(nodes) for nodes in lists} == lists
    for broken in ("", "n[a-b]", "n[]"):
        with pytest.raises(ConfigError, match="has no first host: set MASTER_ADDR"):
            first_host(broken)


def test_mpi_without_threads_is_refused() -> None:
    """Autograd calls MPI from a thread of its own on a GPU."""
    levels = iter((1, 1, 2, 3))
    mpi = SimpleNamespace(
        THREAD_SERIALIZED=2, Query_thread=lambda: next(levels), Get_library_version=lambda: "MPI 1, a"
    )
    with pytest.raises(ConfigError, match=r"MPI \(MPI 1\) provides thread level 1, but transport mpi needs 2"):
        check_threads(mpi)
    check_threads(mpi)
    check_threads(mpi)


def test_too_few_open_files_are_refused_before_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of 1024, as many systems have it: who keeps the store of 1200 ranks needs more, the others do not. Under
    torchrun an agent keeps it."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    for launch in (Launch(6, 1200, 0, 6, "slurm"), Launch(0, 400, 0, 6, "slurm"), Launch(0, 1200, 0, 6, "torchrun")):
        check_open_files(launch)
    with pytest.raises(ConfigError, match=r"no more than 1024 files .* 2\d\d\d are needed on rank 0 of 1200; raise it"):
        check_open_files(Launch(0, 1200, 0, 6, "slurm"))
