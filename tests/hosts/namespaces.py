"""Hosts on one machine: network namespaces joined by a switch, each with an address and a name of its own.

The switch has a namespace too, so that nothing is added to the machine's own network: when a namespace is removed, its
interfaces go with it. Files, processors and memory are shared. Linux, root and the command `ip` are needed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tests.comm.launching import ROOT, clean_environment

INTERFACE = "eth0"
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Host:
    """One of them: `port` is the switch's end of its cable."""

    name: str
    address: str
    namespace: str
    switch: str
    port: str

    def start(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts a command there. The process is the command's own: each step before it gives way to the next."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(self.enter(command), **pipes, text=True, cwd=ROOT, env=clean_environment(environ))

    def enter(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` there."""
        named = ["unshare", "--uts", "sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"', self.name]
        return ["ip", "netns", "exec", self.namespace, *named, *command]

    def pull_cable(self) -> None:
        """No message leaves or reaches the host any more; nobody is told."""
        _ip("-n", self.switch, "link", "set", self.port, "down")


@contextmanager
def hosts(number: int) -> Iterator[list[Host]]:
    """`number` hosts at 10.77.0.1 and up, that reach each other and nothing else. Removes what it made."""
    with _namespaces(number) as (found, switch):
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host in found:
            cable = ["link", "add", host.port, "type", "veth", "peer", "name", INTERFACE, "netns", host.namespace]
            _ip("-n", switch, *cable)
            _ip("-n", switch, "link", "set", host.port, "master", "bridge", "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip("-n", host.namespace, "link", "set", interface, "up")
        yield found


def why_no_hosts() -> str | None:
    """Why this machine cannot have them, or None."""
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if missing:
        return f"no {' and no '.join(missing)} here"
    try:
        with hosts(1) as (host,), host.start(["true"]) as process:
            _, err = process.communicate(timeout=10)
    except RuntimeError as error:
        return str(error).splitlines()[-1]
    return None if process.returncode == 0 else f"no command runs in a network namespace: {err.strip()}"


@contextmanager
def _namespaces(number: int) -> Iterator[tuple[list[Host], str]]:
    """Of the hosts, and the switch's; no cables yet."""
    job = f"tiledseg-{os.getpid()}-{next(_NUMBERS)}"
    with ExitStack() as made:
        switch = made.enter_context(_namespace(f"{job}-switch"))
        names = [made.enter_context(_namespace(f"{job}-{i}")) for i in range(number)]
        yield [Host(f"node{i}", f"10.77.0.{i + 1}", name, switch, f"port{i}") for i, name in enumerate(names)], switch


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    _ip("netns", "add", name)
    try:
        yield name
    finally:
        _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {(done.stderr or done.stdout).strip()}")
