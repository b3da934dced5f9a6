"""Ranks on several hosts: the losses are those of one rank, and a host that is cut off is named in time.

Hosts are network namespaces joined by a switch, each with an address and a name of its own. The switch has a namespace
too, so that nothing is added to the machine's own network: when a namespace is removed, its interfaces go with it.
Files, processors and memory are shared. Linux, root and the command `ip` are needed.
"""

import itertools
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import pytest

from tests.comm.launching import MPIRUN, ROOT, Done, clean_environment, needs_mpirun
from tests.conftest import NIGHTLY
from tests.crash.runs import Material, train
from tests.law.runs import check_same_run

INTERFACE = "eth0"
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Host:
    """A network namespace; `port` is the switch's end of its cable."""

    name: str
    address: str
    namespace: str
    switch: str
    port: str

    def start(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> Popen[str]:
        """Start a command there. The process is the command's own: each step before it gives way to the next."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return Popen(self.enter(command), **pipes, text=True, cwd=ROOT, env=clean_environment(environ))

    def enter(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` there."""
        named = ["unshare", "--uts", "sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"', self.name]
        return ["ip", "netns", "exec", self.namespace, *named, *command]

    def pull_cable(self) -> None:
        """Let no message leave or reach the host any more; nobody is told."""
        _ip("-n", self.switch, "link", "set", self.port, "down")


@contextmanager
def hosts(number: int) -> Iterator[list[Host]]:
    """Yield `number` hosts at 10.77.0.1 and up, that reach each other and nothing else. Remove what was made."""
    job = f"tiledseg-{os.getpid()}-{next(_NUMBERS)}"
    switch, found = f"{job}-switch", []
    with ExitStack() as made:
        _add(switch, made)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for i in range(number):
            host = Host(f"node{i}", f"10.77.0.{i + 1}", f"{job}-{i}", switch, f"port{i}")
            _add(host.namespace, made)
            cable = ["link", "add", host.port, "type", "veth", "peer", "name", INTERFACE, "netns", host.namespace]
            _ip("-n", switch, *cable)
            _ip("-n", switch, "link", "set", host.port, "master", "bridge", "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip("-n", host.namespace, "link", "set", interface, "up")
            found.append(host)
        yield found


def _add(namespace: str, made: ExitStack) -> None:
    _ip("netns", "add", namespace)
    made.callback(_ip, "netns", "del", namespace)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {(done.stderr or done.stdout).strip()}")


def why_no_hosts() -> str | None:
    """Return why this machine cannot have them, or None."""
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if missing:
        return f"no {' and no '.join(missing)} here"
    try:
        with hosts(1) as (host,), host.start(["true"]) as process:
            _, err = process.communicate(timeout=10)
    except RuntimeError as error:
        return str(error).splitlines()[-1]
    return None if process.returncode == 0 else f"no command runs in a network namespace: {err.strip()}"


REASON = why_no_hosts()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no hosts can be made: {REASON}"),
    pytest.mark.usefixtures("without_plots"),
]
nightly = pytest.mark.skipif(not NIGHTLY, reason="TILEDSEG_NIGHTLY is not set")

IMAGES = ("--train.tiles_per_step", "null")
MODES = {
    "read": (),
    "exchange": (*IMAGES, "--parallel.halo", "exchange"),
    "layer": (*IMAGES, "--parallel.halo", "layer"),
}
DEADLINE = 6.0
SECONDS_TO_LEAVE = 6.0
"""From the deadline to the end of the last rank: the watch's graces, and room for a busy machine."""
ENVIRONMENT = {"RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1")}


def by_hand(hosts: Sequence[Host], command: Sequence[str]) -> list[Popen[str]]:
    """Start a rank on each host, which its environment tells its place."""
    meeting = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29400", "WORLD_SIZE": str(len(hosts))}
    places = ENVIRONMENT | meeting | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    words = [sys.executable, "-m", *command]
    return [host.start(words, places | {"RANK": str(rank)}) for rank, host in enumerate(hosts)]


def by_mpirun(hosts: Sequence[Host], command: Sequence[str], agent: Path) -> list[Popen[str]]:
    """Start Open MPI's mpirun on the first host, a rank on each. Writes `agent`, its ssh."""
    entered = "\n".join(
        f'"{host.address}") shift; exec {shlex.join(host.enter(["sh", "-c"]))} "$*" ;;' for host in hosts
    )
    agent.write_text(f'#!/bin/sh\ncase "$1" in\n{entered}\nesac\nexit 1\n')
    agent.chmod(0o755)
    names = ",".join(host.address for host in hosts)
    launcher = [str(MPIRUN), "--prtemca", "plm_ssh_agent", str(agent), "--host", names, "-n", str(len(hosts))]
    return [hosts[0].start([*launcher, sys.executable, "-m", *command], ENVIRONMENT)]


def end_of(
    processes: Sequence[Popen[str]], seconds: float, meanwhile: Callable[[], object] = lambda: None
) -> list[Done]:
    """Return how each one ended; raise subprocess.TimeoutExpired for one that runs on. None is left behind."""
    done = []
    try:
        meanwhile()
        for process in processes:
            out, err = process.communicate(timeout=seconds)
            done.append(Done(process.returncode, out, err, time.time()))
        return done
    finally:
        for process in processes:
            process.terminate()  # mpirun ends its ranks
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def command(material: Material, folder: Path, *options: str) -> list[str]:
    first, *rest = material.train_command(folder)
    return [f"tiledseg.{first}", *rest, *options]


def check_run(material: Material, name: str, mode: str, start: Callable[[list[str]], list[Popen[str]]]) -> None:
    """Train on hosts and alone; the losses agree."""
    alone, folder, short = material.root / f"{name}-alone", material.root / name, ("--train.epochs", "2")
    assert train(material, alone, *MODES[mode], *short) == 0
    ends = end_of(start(command(material, folder, *MODES[mode], *short)), 100)
    assert [done.code for done in ends] == [0] * len(ends), [done.err for done in ends]
    check_same_run(folder, alone, 1e-10)


@needs_mpirun
def test_losses_under_mpirun_are_those_of_one_rank(material: Material) -> None:
    with hosts(2) as nodes:
        check_run(material, "mpirun", "layer", lambda words: by_mpirun(nodes, words, material.root / "agent"))


@nightly
@pytest.mark.parametrize("mode", MODES)
def test_losses_on_four_hosts_are_those_of_one_rank(material: Material, mode: str) -> None:
    with hosts(4) as nodes:
        check_run(material, f"four-{mode}", mode, lambda words: by_hand(nodes, words))


@nightly
@pytest.mark.parametrize("cut", [1, 0])
def test_a_host_that_is_cut_off_is_named_in_time(material: Material, cut: int) -> None:
    """Each side names the other, and no rank is left."""
    folder = material.root / f"cut-{cut}"
    words = command(material, folder, *MODES["layer"], "--train.epochs", "100000", "--parallel.deadline", f"{DEADLINE}")
    moment, log = [time.time()], folder / "metrics.jsonl"

    def cut_off() -> None:
        while not log.exists() or len(log.read_text().splitlines()) < 3:
            assert time.time() < moment[0] + 40, "no three steps within 40 s"
            time.sleep(0.05)
        nodes[cut].pull_cable()
        moment[0] = time.time()

    with hosts(2) as nodes:
        ends = end_of(by_hand(nodes, words), 60, cut_off)
    for rank, done in enumerate(ends):
        assert (done.code, len(done.errors)) == (1, 1), done.err
        assert done.ended - moment[0] < DEADLINE + SECONDS_TO_LEAVE
        named = f"no rank has made progress for {DEADLINE:g} s: rank {1 - rank} on node{1 - rank} not answering"
        assert named in done.errors[0]
