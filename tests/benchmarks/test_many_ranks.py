"""Many real ranks of one machine (`benchmarks/many_ranks`): 16 in one way, all halo modes of 64 at night."""

from __future__ import annotations

import re
import sys

import pytest

from benchmarks.many_ranks.cases import cases
from tests.comm.launching import run_job
from tests.conftest import NIGHTLY


@pytest.mark.timeout(1500)
def test_many_ranks_have_the_losses_and_weights_of_one() -> None:
    ranks, ways = (64, [case.name for case in cases(64)]) if NIGHTLY else (16, ["layer, 4 stages"])
    words = ["--ranks", str(ranks), "--only", *ways]
    done = run_job([sys.executable, "-m", "benchmarks.many_ranks", *words], 1400)
    assert done.code == 0, done.out + done.err
    assert re.findall(r"^\| ([a-z][^|]*) \| \d", done.out, re.MULTILINE) == ways
    sockets = [int(row.split("|")[5]) for row in done.out.splitlines()[2:]]
    assert max(sockets) < 2 * ranks  # of a rank that keeps no store: not one for each of the others
