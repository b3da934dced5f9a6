"""The spatial benchmark's programs run, alone and at tiny sizes, and what they compare is equal before it is timed."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import launching
from benchmarks.spatial import step_case
from tests.comm.launching import clean_environment, run_job
from tiledseg.errors import CommunicationError, ConfigError


def alone(program: str, *arguments: str) -> dict:
    done = run_job([sys.executable, "-m", f"benchmarks.spatial.{program}", *arguments], environ=clean_environment())
    assert done.code == 0, done.err
    return json.loads(done.out.splitlines()[-1])


def test_all_modes_give_one_loss_and_send_what_is_planned() -> None:
    job = step_case.StepJob((1, 1), (step_case.READ, step_case.EXCHANGE, step_case.LAYER), 32, 3, 4, steps=2)
    assert step_case.StepJob.from_json(job.to_json()) == job
    found = alone("step_job", job.to_json())
    losses = [figures["losses"] for figures in found["cases"]]
    assert step_case.check_losses(losses, [str(case) for case in job.cases]) <= 1e-6
    assert len(set(losses[0])) == 3, "the steps learn nothing, so equal losses say nothing of the gradients"
    for case, figures in zip(job.cases, found["cases"], strict=True):
        assert step_case.planned(job, case) == (1.0, figures["halo_bytes"], figures["halo_messages"])
        assert min(figures["seconds"]) > 0
        assert figures["memory_bytes"] >= found["memory_before_bytes"] > 0


def test_a_job_says_how_it_ended() -> None:
    def end(code: str, limit: float = 60) -> dict:
        return launching.run_job([sys.executable, "-c", f"import sys, time; {code}"], limit)

    assert end("print('{\"a\": 1}')") == {"a": 1}
    with pytest.raises(launching.NotRunnableError, match="no such peer"):
        end("sys.stderr.write('not runnable: no such peer'); sys.exit(3)")
    with pytest.raises(ConfigError, match="a wrong flag"):
        end("sys.stderr.write('error: a wrong flag'); sys.exit(2)")
    with pytest.raises(CommunicationError, match="code 1"):
        end("sys.exit(1)")
    with pytest.raises(CommunicationError, match="longer than 0 s"):
        end("time.sleep(60)", limit=0.3)
