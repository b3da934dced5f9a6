"""Machines that batch scripts are written for: what their documentation says of nodes, local disks and launchers.

Nothing here was measured, and no job of ours has run on a machine with a name: on one node of Slurm's own and under
stand-ins of LSF's commands only (`tests/test_jobs.py`). Sources: the user guides of OLCF (Summit, Frontier) and NERSC
(Perlmutter), and the manuals of Slurm and LSF.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiledseg.errors import ConfigError

SYSTEMS = ("slurm", "lsf")


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


_SITES = (
    Site("generic", "slurm", launcher="srun", local="/tmp/$(id -un)-tiledseg", cores=7),
    # 8 halves of 4 MI250X a node; 56 of 64 cores, since the system keeps the first of each group of 8.
    Site(
        "frontier",
        "slurm",
        launcher="srun",
        local="/mnt/bb/$(id -un)",
        cores=7,
        gpus=8,
        directives=("--constraint=nvme",),
        exports=(
            "NCCL_SOCKET_IFNAME=hsn0",
            'MIOPEN_USER_DB_PATH="/tmp/miopen-$SLURM_JOB_ID"',  # not on the file system that all ranks share
            'MIOPEN_CUSTOM_CACHE_DIR="/tmp/miopen-$SLURM_JOB_ID"',
        ),
    ),
    # 4 A100 a node, and 128 threads of 64 cores; /tmp is memory.
    Site(
        "perlmutter",
        "slurm",
        launcher="srun",
        local="/tmp/$(id -un)-tiledseg",
        cores=32,
        gpus=4,
        directives=("--constraint=gpu", "--qos=regular"),
        exports=("NCCL_SOCKET_IFNAME=hsn",),
    ),
    Site("generic", "lsf", launcher="mpirun", local="/tmp/$(id -un)-tiledseg", cores=7),
    # 6 V100 and 42 cores a node.
    Site(
        "summit",
        "lsf",
        launcher="jsrun",
        local="/mnt/bb/$(id -un)",
        cores=7,
        gpus=6,
        directives=('-alloc_flags "smt1 nvme"',),
    ),
)


def find_site(system: str, name: str) -> Site:
    """Raises ConfigError for a machine that is not known under that batch system."""
    for site in _SITES:
        if (site.system, site.name) == (system, name):
            return site
    known = ", ".join(site.name for site in _SITES if site.system == system)
    raise ConfigError(f"--site is '{name}', but --emit {system} knows {known}; give one of them")
