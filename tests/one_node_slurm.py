"""A real Slurm of one node, in a folder of its own, for the length of a test. Needs root; installs it on Debian."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.comm.launching import free_ports

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "sinfo", "scontrol", "scancel", "squeue")
_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=6
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class SlurmUnavailableError(Exception):
    """Why no Slurm can be had here, in one line."""


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def install() -> None:
    """Installs Slurm where it is missing, without starting its services. Raises SlurmUnavailableError."""
    if os.geteuid() != 0:
        raise SlurmUnavailableError("slurmd and munged need root")
    if all(_find(program) for program in _PROGRAMS):
        return
    if shutil.which("apt-get") is None:
        raise SlurmUnavailableError("slurmctld is not installed and there is no apt-get")
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *_PACKAGES]):
        try:
            done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
        except subprocess.TimeoutExpired:
            raise SlurmUnavailableError(f"{' '.join(command[:2])} took more than 240 s") from None
        if done.returncode:
            last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise SlurmUnavailableError(f"{' '.join(command[:2])} failed: {last_line}")


@contextmanager
def one_node_slurm(folder: Path, cpus: int) -> Iterator[dict[str, str]]:
    """Starts munged, slurmctld and slurmd in `folder`; yields the variables under which Slurm's commands find them.

    `cpus` may be more than the machine has. Ends the daemons that it started, and nothing else.
    """
    install()
    host = socket.gethostname()
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    ports = dict(zip(("controller_port", "node_port"), free_ports(2), strict=True))
    configuration = folder / "slurm.conf"
    configuration.write_text(_CONFIGURATION.format(host=host, folder=folder, cpus=cpus, **ports))
    environ = {"SLURM_CONF": str(configuration), "PATH": f"{os.environ['PATH']}:/usr/sbin"}

    def ask(*command: str) -> str:
        everything = {**os.environ, **environ}
        return subprocess.run(command, env=everything, capture_output=True, text=True, timeout=30).stdout.strip()

    def is_idle() -> bool:
        state = ask("sinfo", "--noheader", "--format=%T")
        if state in ("down", "drained", "unknown*", "down*"):
            ask("scontrol", "update", f"nodename={host}", "state=resume")
        return state == "idle"

    def cancel_jobs() -> None:  # what a failed test left running, while the daemons can still do it
        ask("scancel", "--user=root", "--signal=KILL")
        end = time.monotonic() + 10
        while ask("squeue", "--noheader") and time.monotonic() < end:
            time.sleep(0.2)

    with ExitStack() as stack:
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = [f"--{option}={folder}/munge.{end}" for option, end in files.items()]
        stack.enter_context(_daemon(folder, "munged", "--foreground", "--force", *munge))
        _wait(lambda: (folder / "munge.socket").exists(), "munged's socket", folder)
        stack.enter_context(_daemon(folder, "slurmctld", "-D", "-f", str(configuration)))
        stack.enter_context(_daemon(folder, "slurmd", "-D", "-f", str(configuration)))
        _wait(is_idle, "an idle node", folder)
        stack.callback(cancel_jobs)
        yield environ


@contextmanager
def _daemon(folder: Path, program: str, *arguments: str) -> Iterator[None]:
    path = _find(program)
    assert path is not None
    with (folder / f"{program}.out").open("w") as log:
        process = subprocess.Popen([path, *arguments], stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(condition: Callable[[], bool], what: str, folder: Path, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            logs = [line for log in folder.glob("*.out") for line in log.read_text().splitlines()[-3:]]
            raise SlurmUnavailableError(f"no {what} within {seconds:.0f} s: {' | '.join(logs)}")
        time.sleep(0.2)
