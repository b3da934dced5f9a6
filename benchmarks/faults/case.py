"""One case: the run meets its fault, the fault is taken away, the run goes on; and what is wrong with any of that."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults.acts import ACTS, AWAY, CHECKPOINTS, IMAGE, JUDGED, METRICS
from benchmarks.faults.job import NOTE, Order, train_unseen
from benchmarks.faults.kinds import EVERY, KINDS, PER_NODE, STEPS, TILES, Trial, draw_trial
from benchmarks.forks import Outcome, run_function, run_ranks
from benchmarks.launching import mpirun, run_process
from tests.small_files import write_raster, write_yaml
from tiledseg.checkpoint.folder import newest_checkpoint
from tiledseg.errors import CheckpointError, CommunicationError

LIMIT, MPIRUN_LIMIT = 30.0, 60.0
"""Seconds in which a start has to end."""
_ROOT_ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class Result:
    """What one case came to. `missed`: the run ended whole under its fault. `lost`: steps that were done again;
    `mpirun`: its ranks were started by it, and were no forks;
    `recovery`: seconds from the start to the first step that had not been done before; None where none was left."""

    number: int
    kind: str
    ranks: int
    mpirun: bool
    words: str
    code: int
    seconds: float
    in_time: bool
    named: bool
    equal: bool
    missed: bool
    lost: int | None
    recovery: float | None
    faults: list[str]
    said: str


class Workshop:
    """Folders below `root` in which cases run one after the other, and the runs that none disturbed."""

    def __init__(self, root: Path) -> None:
        self._case, self._pristine = root / "case", root / "pristine"
        self._whole: dict[int, tuple[list[tuple[int, float]], bytes]] = {}
        self._pristine.mkdir(parents=True)
        _make_material(self._pristine)

    def run(self, seed: int, number: int) -> Result:
        """Case `number` of a seed."""
        trial = draw_trial(seed, number)
        whole = self._undisturbed(trial.ranks)
        self._restore()
        outcome, standing, words = self._meet(trial)
        faults = wrong_end(trial, outcome)
        named = not any(fault.startswith("cause") for fault in faults)
        kind = KINDS[trial.kind]
        missed = outcome.code == 0 and not kind.harms and trial.moment is not None
        begun = time.time() - outcome.seconds
        if outcome.code != 0 or kind.harms:
            anew = kind.harms and trial.moment is not None
            self._repair(anew)
            standing, begun = (STEPS, 0) if anew else _standing(self._case), time.time()
            again = self._start(trial, Order(done=standing[0] % STEPS), trial.left or trial.ranks)
            if again.code != 0:
                faults.append(f"the run does not go on: exit {again.code}: {again.err.strip()[-300:]}")
        different = self._different(whole)
        faults += different
        lost = None if missed else standing[0] - standing[1]
        recovery = None if missed else self._recovery(begun)
        said = outcome.err.strip()[-600:]
        return Result(
            *(number, trial.kind, trial.ranks, trial.mpirun, words, outcome.code, outcome.seconds, not outcome.hung),
            *(named, not different, missed, lost, recovery, faults, said),
        )

    def _undisturbed(self, ranks: int) -> tuple[list[tuple[int, float]], bytes]:
        """Losses and last weights of the run that meets no fault, on so many ranks."""
        if ranks not in self._whole:
            self._restore()
            done = self._start(Trial("kill -9", ranks, None), Order(), ranks)
            if done.code != 0:
                raise RuntimeError(f"the undisturbed run ends with {done.code}: {done.err}")
            self._whole[ranks] = losses(self._case), _weights(self._case)
        return self._whole[ranks]

    def _restore(self) -> None:
        shutil.rmtree(self._case, ignore_errors=True)
        shutil.copytree(self._pristine, self._case)

    def _meet(self, trial: Trial) -> tuple[Outcome, tuple[int, int], str]:
        """The start that the fault befalls, what the runs had done and kept before it, and the fault in words."""
        if trial.moment is not None:
            words = ", ".join(f"{key} {value}" for key, value in asdict(trial.moment).items())
            return self._start(trial, Order(trial.moment, STEPS), trial.ranks), (0, 0), words
        assert trial.stopped is not None
        assert trial.at_rest is not None
        self._start(trial, Order(trial.stopped, STEPS), trial.ranks)
        act, draw = trial.at_rest
        shutil.copytree(self._case / "run", self._case / "kept")
        here = Path.cwd()
        os.chdir(self._case)
        try:
            ACTS[act](draw)
        finally:
            os.chdir(here)
        standing = _standing(self._case)
        words = f"{trial.stopped.act} in step {trial.stopped.step}, then {act} {draw}"
        return self._start(trial, Order(done=standing[0]), trial.ranks), standing, words

    def _repair(self, anew: bool) -> None:
        """Takes the fault away: what was moved or changed is as it was. `anew`: what the run has done is of no use."""
        away, run, kept = self._case / AWAY, self._case / "run", self._case / "kept"
        if kept.exists() or (away / "metrics.jsonl").exists():
            shutil.rmtree(run, ignore_errors=True)
            os.replace(kept if kept.exists() else away, run)
        if anew:
            shutil.rmtree(run)
        shutil.copy(self._pristine / IMAGE, self._case / IMAGE)

    def _start(self, trial: Trial, order: Order, ranks: int) -> Outcome:
        """One start, to its end or its limit."""
        (self._case / NOTE).unlink(missing_ok=True)
        order = replace(order, options=KINDS[trial.kind].options)
        if ranks == 1:
            return run_function(lambda: train_unseen(order), self._case, limit=LIMIT)
        if trial.mpirun:
            return self._start_by_mpirun(order, ranks)
        stopped = order.moment.rank if order.moment is not None and order.moment.act == "stop" else None
        grace = 20.0 if stopped is None else 1.0
        per_node = PER_NODE if trial.left else ranks
        return together(run_ranks(lambda: train_unseen(order), ranks, self._case, LIMIT, per_node, grace), stopped)

    def _start_by_mpirun(self, order: Order, ranks: int) -> Outcome:
        command = mpirun(ranks, "benchmarks.faults.job", str(self._case), order.text())
        begun = time.monotonic()
        try:
            done = run_process(command, MPIRUN_LIMIT, _ROOT_ALLOWED)
        except CommunicationError as error:
            return Outcome(124, "", str(error), time.monotonic() - begun, True)
        return Outcome(done.code, done.out, done.err, time.monotonic() - begun, False)

    def _different(self, whole: tuple[list[tuple[int, float]], bytes]) -> list[str]:
        """How the run that went on differs from the undisturbed one."""
        try:
            found, weights = losses(self._case), _weights(self._case)
        except (OSError, ValueError) as error:
            return [f"the run is not whole: {error}"]
        wrong = [here for here, there in zip(found, whole[0], strict=False) if here != there]
        if wrong or len(found) != len(whole[0]):
            return [f"losses differ: {len(found)} lines for {len(whole[0])}, first {wrong[:1]}"]
        return [] if weights == whole[1] else ["the last checkpoint's weights differ"]

    def _recovery(self, begun: float) -> float | None:
        note = self._case / NOTE
        return float(note.read_text()) - begun if note.exists() else None


def together(ends: Sequence[Outcome], stopped: int | None = None) -> Outcome:
    """How a job ended whose ranks ended like this: with the signal that killed one, else with the largest code. A rank
    that was stopped, and had to be killed, does not count."""
    counted = [end for rank, end in enumerate(ends) if rank != stopped]
    codes = [end.code for end in counted]
    code = min(codes) if min(codes) < 0 else max(codes)
    out, err = "".join(end.out for end in ends), "".join(end.err for end in ends)
    return Outcome(code, out, err, max(end.seconds for end in counted), any(end.hung for end in counted))


def losses(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of every line of metrics."""
    lines: list[dict[str, Any]] = [json.loads(text) for text in (folder / METRICS).read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def _weights(folder: Path) -> bytes:
    return (folder / CHECKPOINTS / f"step-{STEPS:06d}" / "model.safetensors").read_bytes()


def _standing(folder: Path) -> tuple[int, int]:
    """Steps that were done, and steps that the newest whole checkpoint keeps."""
    done = 0
    with suppress(OSError, ValueError):  # no file, or a line that is not whole: the last one
        for line in (folder / METRICS).read_text().splitlines():
            done = json.loads(line)["step"]
    try:
        newest = newest_checkpoint(folder / CHECKPOINTS)
    except CheckpointError:
        newest = None
    return done, newest.saved.step if newest else 0


def wrong_end(trial: Trial, outcome: Outcome) -> list[str]:
    """What is wrong with how the run ended under its fault."""
    kind = KINDS[trial.kind]
    if outcome.hung:
        return [f"cause unknown: still running after {outcome.seconds:.0f} s"]
    faults = []
    if "Traceback" in outcome.err:
        faults.append("a traceback on standard error")
    if outcome.code == 0 and kind.may_miss:
        return faults
    if outcome.code not in kind.codes:
        faults.append(f"cause not told by exit code {outcome.code}; expected {kind.codes}")
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    most = 1 if trial.mpirun else trial.ranks  # mpirun ends the others once one has failed
    if outcome.code in (1, 2) and not 1 <= len(errors) <= most:
        faults.append(f"cause told in {len(errors)} lines of error")
    rank = trial.moment.rank if trial.moment else 0
    alone = trial.ranks == 1 and outcome.code < 0
    if not alone and not re.search(kind.words.replace("{rank}", str(rank)), outcome.err):
        faults.append(f"cause not named: no '{kind.words}'")
    return faults


def _make_material(root: Path) -> None:
    """Two images of 32 x 64 pixels in eight tiles, their labels, and a run of six epochs of two steps."""
    generator = np.random.default_rng(5)
    labels_HW = np.kron(generator.integers(0, 3, (8, 16)), np.ones((4, 4))).astype(np.uint8)
    for name in (IMAGE, JUDGED):
        image_CHW = (generator.integers(0, 60, (3, 32, 64)) + 60 * labels_HW + 1).astype(np.float32)
        write_raster(root / name, image_CHW)
    write_raster(root / "labels.tif", labels_HW[None])
    config = {
        "data": {"images": "image.tif", "labels": "labels.tif", "classes": 3, "workers": 1},
        "tiling": {"grid": [2, 4]},
        "model": {"levels": 2, "convs_per_level": 1, "base_channels": 2, "dropout": 0.2},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "train": {
            "epochs": STEPS // 2,
            "tiles_per_step": TILES,
            "checkpoint_every": EVERY,
            "keep_checkpoints": 3,
            "largest_loss": 50.0,
        },
        "parallel": {"deadline": 12.0},  # short, so that ranks that are lost are named soon
        "run": {"output": "run", "verbosity": 1},
    }
    write_yaml(root / "run.yaml", config)
