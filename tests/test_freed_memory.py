"""Freed memory is kept, and what the user has said of it is respected."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.launching import ROOT, clean_environment
from tiledseg.errors import ConfigError
from tiledseg.system.freed_memory import SWITCH, available_bytes, why_not_kept

# A program prints pages: those that the system makes for a second block of 100 MB, or takes back of 128 MB in small
# blocks, freed but for the last.
START = """
import ctypes, os, resource
from tiledseg.system.freed_memory import give_back_freed, keep_freed_memory, keep_no_more
keep_freed_memory(os.environ)
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
def held():
    return int(open("/proc/self/statm").read().split()[1])
"""
PAGES = """
for time in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = library.malloc(ctypes.c_size_t(100_000_000))
    ctypes.memset(block, 1, 100_000_000)
    library.free(ctypes.c_void_p(block))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
NO_MORE = "keep_no_more(os.environ)" + PAGES
HOLES = """
blocks = [library.malloc(ctypes.c_size_t(64_000)) for _ in range(2_000)]
for block in blocks:
    ctypes.memset(block, 1, 64_000)
for block in blocks[:-1]:
    library.free(ctypes.c_void_p(block))
before = held()
give_back_freed()
print(before - held())
"""
MANY = 20_000


@pytest.mark.skipif(why_not_kept({}) is not None, reason="the C library is not glibc")
@pytest.mark.parametrize(
    ("program", "variables", "many"),
    [(PAGES, {}, False), (PAGES, {SWITCH: "0"}, True), (NO_MORE, {}, True), (HOLES, {}, True)],
)
def test_pages_are_kept_or_given_back(program: str, variables: dict[str, str], many: bool) -> None:
    environ = {k: v for k, v in clean_environment().items() if not k.startswith(("MALLOC_", "GLIBC_", "TILEDSEG_"))}
    command = [sys.executable, "-c", START + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env={**environ, **variables})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > MANY if many else int(done.stdout) < 100


def test_the_switch() -> None:
    assert why_not_kept({SWITCH: "0"}) == f"{SWITCH}=0"
    assert why_not_kept({SWITCH: "1"}) == why_not_kept({})
    with pytest.raises(ConfigError, match=f"{SWITCH}=yes is neither 0 nor 1"):
        why_not_kept({SWITCH: "yes"})


def _host(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {
        "proc/meminfo": "MemTotal: 900 kB\nMemFree: 10 kB\nMemAvailable:     800 kB\n",
        "proc/self/cgroup": groups,
        **files,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


GROUP_1, GROUP_2 = "4:memory:/slurm/job/step\n2:cpu:/\n0::/\n", "0::/slurm/job/step\n"


def job(version: int, limit: str, used: int, of_files: int) -> dict[str, str]:
    """Return the files of a job's control group."""
    folder, names, counted = "sys/fs/cgroup/slurm/job/memory", ("max", "current"), "inactive_file"
    if version == 1:
        folder = "sys/fs/cgroup/memory/slurm/job/memory"
        names, counted = ("limit_in_bytes", "usage_in_bytes"), "inactive_file 5\ntotal_inactive_file"
    values = {names[0]: limit, names[1]: used, "stat": f"anon 9\n{counted} {of_files}"}
    return {f"{folder}.{name}": f"{value}\n" for name, value in values.items()}


@pytest.mark.parametrize(
    ("groups", "files", "kilobytes"),
    [
        (GROUP_2, {}, 800),  # pages of files count as free
        (GROUP_2, job(2, "max", 7, 0), 800),
        (GROUP_2, job(2, "409600", 204800, 1024), 201),
        (GROUP_1, job(1, str(2**63 - 4096), 7, 0), 800),
        (GROUP_1, job(1, "409600", 204800, 1024), 201),
        (GROUP_1, job(1, "7", 8, 0), 0),
    ],
)
def test_memory_is_free_within_a_job_s_limits(
    tmp_path: Path, groups: str, files: dict[str, str], kilobytes: int
) -> None:
    assert available_bytes(_host(tmp_path, groups, files)) == 1024 * kilobytes


def test_this_host_has_memory() -> None:
    assert 1 << 20 < available_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
