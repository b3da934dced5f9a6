"""Some runs of one number of ranks, one after the other in one job: `train` itself, its steps timed.

    mpirun -n 2 python -m benchmarks.cost_model.job FOLDER RANKS [STEPS [CASE]]

FOLDER has the images. A line of JSON a run goes to `FOLDER/ranks-RANKS.jsonl`: seconds of each step by the clock, and
CPU seconds of the rank that took most; what the run asked of the planner lies beside it, to be asked again. Of a CASE
alone, by its name, to `FOLDER/memory.jsonl`: the most bytes that its process held in two steps, a checkpoint and a
picture after each, freed memory going back to the system, and what its third step allocated.
"""

from __future__ import annotations

import base64
import json
import pickle
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cost_model.cases import Case, cases
from tiledseg.comm.session import leave, run_on_mesh
from tiledseg.commands.config_file import parse_config, to_yaml
from tiledseg.system.freed_memory import keep_freed_memory, keep_no_more

if TYPE_CHECKING:
    from tiledseg.comm.mesh import Mesh
    from tiledseg.planning.run.question import RunQuestion


def main() -> int:
    import os

    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    name = sys.argv[4] if len(sys.argv) > 4 else None
    (keep_freed_memory if name is None else keep_no_more)(os.environ)

    def body(mesh: Mesh) -> None:
        import torch

        torch.set_num_threads(1)
        for case in cases():
            if case.ranks == ranks and name in (None, case.name):
                line = run(case, folder, steps, mesh, metered=name is not None)
                if mesh.is_root:
                    with (folder / (f"ranks-{ranks}.jsonl" if name is None else "memory.jsonl")).open("a") as file:
                        file.write(json.dumps(line) + "\n")

    return run_on_mesh(body, "auto")


def run(case: Case, folder: Path, steps: int, mesh: Mesh, metered: bool = False) -> dict[str, Any]:
    """Trains; what was measured, and what was asked. `metered`: memory too. Collective."""
    from tiledseg.training.start import start

    output = folder / "run"
    image, labels = folder / f"image-{case.side}.tif", folder / f"labels-{case.side}.tif"
    keys = {
        "data.images": str(image),
        "data.labels": str(labels),
        "data.classes": "5",
        "train.epochs": str(steps),
        "run.output": str(output),
        "run.verbosity": "0",
        "train.checkpoint_every": "1" if metered else "1000",
    }
    words = [word for key, value in (keys | case.keys).items() for word in (f"--{key}", value)]
    config = parse_config(words, "benchmark", "")
    with _timed(metered) as found:
        start(config, to_yaml(config), mesh)
    mesh.on_root(lambda: shutil.rmtree(output))
    each = mesh.communicator.gather_objects(found["steps"])
    clock = [seconds for seconds, _ in each[0]]
    cpu = [max(step[1] for step in ranks) for ranks in zip(*each, strict=True)]
    asked = base64.b64encode(pickle.dumps(found["question"])).decode()
    line = {"case": case.name, "ranks": case.ranks, "clock": clock, "cpu": cpu, "question": asked}
    if metered:
        line |= {"allocated": found["allocated"], "resident": found["resident"]}
    return line


@contextmanager
def _timed(metered: bool) -> Iterator[dict[str, Any]]:
    """Steps of the trainer in the block, and what was asked of the planner."""
    import torch

    from benchmarks.planned_peaks import allocator_peak
    from tiledseg.tracing.allocations import AllocationMeter
    from tiledseg.training import start as begun
    from tiledseg.training.run_folder import journal
    from tiledseg.training.steps.step import Stepper

    found: dict[str, Any] = {"steps": []}
    whole, trainer, seconds = Stepper.run, begun.Trainer, journal._DRAW_SECONDS

    def timed(stepper: Stepper, *arguments: Any) -> Any:
        clock, cpu = time.perf_counter(), time.process_time()
        if metered and len(found["steps"]) == 2:
            found["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            lasting = _lasting(stepper)
            held, results = sum(tensor.nbytes for tensor in lasting), []
            if lasting[0].dtype == torch.float64:  # whose kernels unfold their input, which the meter does not see
                found["allocated"] = held + allocator_peak(lambda: results.append(whole(stepper, *arguments)))
            else:
                with AllocationMeter(lasting) as meter:
                    results.append(whole(stepper, *arguments))
                found["allocated"] = held + meter.peak
            result = results[0]
        else:
            result = whole(stepper, *arguments)
        found["steps"].append((time.perf_counter() - clock, time.process_time() - cpu))
        return result

    def watched(mesh: Mesh, preparation: Any, *arguments: Any) -> Any:
        found["question"] = as_run(preparation.question, preparation.plan)
        return trainer(mesh, preparation, *arguments)

    Stepper.run, begun.Trainer = timed, watched  # type: ignore[method-assign, assignment, misc]
    journal._DRAW_SECONDS = 0.0 if metered else seconds
    try:
        yield found
    finally:
        Stepper.run, begun.Trainer = whole, trainer  # type: ignore[method-assign, misc]
        journal._DRAW_SECONDS = seconds


def _lasting(stepper: Any) -> list[Any]:
    """Weights, the optimizer's values, and the sums of gradients: what is there before a step and after it."""
    optimizer = stepper._optimizer
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    values = [value for state in optimizer.state.values() for value in state.values() if hasattr(value, "nbytes")]
    return [*weights, *values, *stepper._reducer.buckets]


def as_run(question: RunQuestion, plan: Any) -> RunQuestion:
    """The question with what a run has found out by itself: the balance of its stages, by times that it measured."""
    if plan.pipeline is None:
        return question
    return replace(question, parallel=replace(question.parallel, balance=plan.pipeline.balance, timed=False))


if __name__ == "__main__":
    leave(main())
