"""What a run was, beside its configuration: the command, where, when and with what it ran, and its warnings."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from dataclasses import field
from typing import Any

from tiledseg.comm.diagnosis import report_rank
from tiledseg.comm.mesh import Mesh
from tiledseg.records import dataclass


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


@dataclass(frozen=True)
class About:
    """`command`: as it was typed, but for the launcher; `hosts`: of all ranks; `begun`: ISO 8601."""

    command: str = ""
    warnings: Sequence[str] = ()
    hosts: Sequence[str] = ()
    begun: str = field(default_factory=_now)

    def to_json(self, mesh: Mesh) -> dict[str, Any]:
        """For `summary.json`, on the root, whose device and versions stand for all."""
        own = report_rank(mesh, ask_mpi=False)
        hosts = list(dict.fromkeys(self.hosts or [mesh.host]))
        return {
            "command": self.command,
            "begun": self.begun,
            "warnings": list(self.warnings),
            "machine": {
                "hosts": ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""),
                "system": platform.platform(),
                "processor": platform.machine(),
                "device": own.device,
                "threads a rank": own.threads,
                "cores a rank": own.cores,
            },
            "versions": own.versions,
        }
