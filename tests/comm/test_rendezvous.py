"""The ranks find each other: on one node, on several, without a resolvable host name, with the loopback alone."""

import os
import shutil
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.comm.launching import MPIRUN, needs_mpirun, oversubscribe, run_job
from tiledseg.comm import rendezvous
from tiledseg.comm.doing import name_ranks
from tiledseg.comm.launch import Launch
from tiledseg.comm.rendezvous import await_all_ranks, first_reachable, gloo_interface, open_store, slurm_master
from tiledseg.errors import CommunicationError, ConfigError

JOB = str(Path(__file__).with_name("job.py"))
ONE_NODE = Launch(1, 4, 1, 4, "slurm")
TWO_NODES = Launch(1, 4, 1, 2, "slurm")
STEP = {"SLURM_STEP_NODELIST": "n[007-008]", "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0"}


def test_slurm_master_is_the_first_host_of_the_step() -> None:
    assert slurm_master(STEP, TWO_NODES) == ("n007", 15000 + 123456 % 15000)
    assert slurm_master(STEP, ONE_NODE)[0] == "127.0.0.1"
    assert slurm_master({"SLURM_JOB_NODELIST": "a,b", "SLURM_JOB_ID": "1"}, TWO_NODES) == ("a", 15001)
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_ID"):
        with pytest.raises(ConfigError, match="set MASTER_ADDR and MASTER_PORT"):
            slurm_master({key: value for key, value in STEP.items() if key != name}, TWO_NODES)
    steps = ({**STEP, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step} for job in ("5000", "29999") for step in "019")
    ports = {slurm_master(step, TWO_NODES)[1] for step in steps}
    assert len(ports) == 6, "neighbouring jobs and steps keep stores of their own"
    assert 15000 <= min(ports) <= max(ports) < 30000


def test_the_first_reachable_host_is_taken_and_none_is_one_clear_line() -> None:
    """Names that do not resolve are passed over."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert first_reachable(["no-such-host.invalid", "127.0.0.1"], port, 10) == "127.0.0.1"
    with pytest.raises(CommunicationError, match=f"port {port} of no-such-host.invalid, 127.0.0.1"):
        first_reachable(["no-such-host.invalid", "127.0.0.1"], port, 0.0)


@pytest.mark.parametrize(
    ("address", "expected"), [("10.1.2.3", None), ("127.0.1.1", "ib0"), (None, "ib0")], ids=["own", "debian", "unknown"]
)
def test_gloo_interface_across_nodes(
    monkeypatch: pytest.MonkeyPatch, address: str | None, expected: str | None
) -> None:
    """Gloo's own choice holds only where the host's name resolves to what other nodes can reach."""

    def resolve(_: str) -> str:
        if address is None:
            raise socket.gaierror("unknown")
        return address

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setattr(rendezvous, "_addresses", lambda: {"ib0": "10.1.2.3"})
    assert gloo_interface(TWO_NODES) == expected


def test_gloo_interface_on_one_node_is_the_loopback() -> None:
    name = gloo_interface(ONE_NODE)
    assert name is not None
    assert name in [interface for _, interface in socket.if_nameindex()]
    assert name.startswith("lo")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({"MASTER_ADDR": "127.0.0.1"}, "MASTER_ADDR=127.0.0.1 but MASTER_PORT=None: set both or neither"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not a port"),
    ],
)
def test_torchrun_variables_without_a_meeting_point(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(Launch(0, 2, 0, 2, "torchrun"), variables, None)


@needs_mpirun
@pytest.mark.slow
def test_mpirun_with_the_loopback_alone_and_a_name_that_does_not_resolve() -> None:
    """As in a bare container without a network. Ranks share the cores of their host without OMP_NUM_THREADS."""
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        pytest.skip("no unshare, or not root: no container can be made")
    assert MPIRUN is not None
    job = f"{MPIRUN} {' '.join(oversubscribe())} -n 2 {sys.executable} {JOB} fine"
    alone = f"unset OMP_NUM_THREADS; ip link set lo up && hostname no-such-host-{os.getpid()} && exec {job}"
    probe = subprocess.run([unshare, "--net", "--uts", "true"], capture_output=True, text=True, timeout=20)
    if probe.returncode or shutil.which("ip") is None:
        pytest.skip(f"no network namespaces here: {probe.stderr.strip() or 'no ip command'}")
    done = run_job([unshare, "--net", "--uts", "bash", "-c", alone])
    assert (done.code, done.errors) == (0, []), done.err
    assert f"sum 2 over gloo threads {max(1, len(os.sched_getaffinity(0)) // 2)}\n" in done.out


def test_ranks_that_do_not_arrive_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "arrival_timeout", lambda size: timedelta(seconds=0.2))
    store = dist.HashStore()
    store.set("rank 1 is here", "")
    store.add("ranks here", 1)
    with pytest.raises(CommunicationError, match=r"2 of 4 ranks did not arrive within 0\.2 s: ranks 2-3; start them"):
        await_all_ranks(store, Launch(0, 4, 0, 4, "torchrun"))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([0, 1, 2, 5], "ranks 0-2, 5"),
        (list(range(0, 1200, 2)), "ranks 0, 2, 4, 6, 8, 10 and 594 more"),
    ],
    ids=["one", "runs", "many"],
)
def test_names_of_ranks_stay_short(ranks: list[int], words: str) -> None:
    assert name_ranks(ranks) == words
