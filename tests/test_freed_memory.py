"""Freed memory is kept, and what the user has said of it is respected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.launching import ROOT, clean_environment
from tiledseg.errors import ConfigError
from tiledseg.system.freed_memory import SWITCH, available_bytes, why_not_kept

# A block of 100 MB is written and freed, twice; then what the system had to do for the second time, in pages.
PAGES = """
import ctypes, os, resource
from tiledseg.system.freed_memory import keep_freed_memory
keep_freed_memory(os.environ)
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
for time in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = library.malloc(ctypes.c_size_t(100_000_000))
    ctypes.memset(block, 1, 100_000_000)
    library.free(ctypes.c_void_p(block))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
# 128 MB in small blocks, freed but for the last; pages held before and after they are given back.
HOLES = """
import ctypes, os
from tiledseg.system.freed_memory import give_back_freed, keep_freed_memory
keep_freed_memory(os.environ)
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
blocks = [library.malloc(ctypes.c_size_t(64_000)) for _ in range(2_000)]
for block in blocks:
    ctypes.memset(block, 1, 64_000)
for block in blocks[:-1]:
    library.free(ctypes.c_void_p(block))
def held():
    return int(open("/proc/self/statm").read().split()[1])
before = held()
give_back_freed()
print(before - held())
"""
# The kernel's pages for a second block of 100 MB, once nothing is kept any more.
NO_MORE = PAGES.replace("import keep_freed_memory", "import keep_freed_memory, keep_no_more").replace(
    "library = ", "keep_no_more(os.environ)\nlibrary = "
)
glibc = pytest.mark.skipif(why_not_kept({}) is not None, reason="the C library is not glibc")


def pages(extra: dict[str, str], program: str = PAGES) -> int:
    environ = {k: v for k, v in clean_environment().items() if not k.startswith(("MALLOC_", "GLIBC_", "TILEDSEG_"))}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT, env={**environ, **extra}
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@glibc
def test_the_next_block_takes_the_pages_of_the_last() -> None:
    assert pages({}) < 100 < 20_000 < pages({SWITCH: "0"})
    assert pages({"MALLOC_TRIM_THRESHOLD_": "131072"}) > 20_000


@glibc
def test_what_was_to_be_kept_is_given_back_from_a_word_on() -> None:
    assert pages({}, NO_MORE) > 20_000
    assert pages({"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}, NO_MORE) < 100  # the user's word stays


@glibc
def test_what_is_kept_is_given_back_when_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLES], env=clean_environment(), cwd=ROOT, capture_output=True, text=True
    )
    assert int(done.stdout) * 4096 > 100_000_000, done.stderr


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({}, None),
        ({SWITCH: "1"}, None),
        ({SWITCH: "0"}, f"{SWITCH}=0"),
        ({"MALLOC_ARENA_MAX": "2"}, None),
        ({"MALLOC_MMAP_MAX_": "7"}, "MALLOC_MMAP_MAX_=7 decides"),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2:glibc.malloc.top_pad=9"}, "glibc.malloc.top_pad=9 decides"),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, None),
    ],
)
def test_the_users_word_is_the_last(environ: dict[str, str], reason: str | None) -> None:
    assert why_not_kept(environ) == reason


def test_a_switch_that_is_neither_is_bad_input() -> None:
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
