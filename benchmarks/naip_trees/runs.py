"""One run of a row: trained, and scored on the held-out blocks by its own validation."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.launching import python, run_process
from benchmarks.naip_trees.cities import TREES
from benchmarks.naip_trees.rows import Settings, of_run
from tiledseg.errors import CommunicationError

HELD_OUT, HELD_OUT_MAPS, OTHER_CITY, SECONDS = "held_out", "held_out_maps", "other_city", "seconds"


@dataclass(frozen=True)
class Place:
    """`data`: the folder of the files; `out`: of the results, a folder a row and in it one a seed; `limit`: seconds."""

    data: Path
    out: Path
    limit: float

    def run(self, name: str, seed: int) -> Path:
        return self.out / name / str(seed)


def train_row(place: Place, name: str, settings: Settings, seed: int, steps: int) -> str:
    """Trains one run, unless its result is there, and says its score in words."""
    folder = place.run(name, seed)
    if not result_file(folder).exists():
        folder.mkdir(parents=True, exist_ok=True)
        asked = of_run(settings, place.data, folder / "run", steps, seed)
        (folder / "config.yaml").write_text(yaml.safe_dump(asked, sort_keys=False))
        begun = time.perf_counter()
        call(place, "tiledseg.train", "--config", str(folder / "config.yaml"))
        write_result(folder, _told(folder / "run", time.perf_counter() - begun))
    found = read_result(folder)
    score = f"{found[HELD_OUT]:.4f} on held-out blocks" if HELD_OUT in found else "no block held out"
    return f"{name} seed {seed}: {score}, {found['steps']} steps, {found[SECONDS]:.0f} s"


def _told(run: Path, seconds: float) -> dict[str, Any]:
    """What a finished run says of itself: its last validation, where blocks are held out, and its size."""
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held_out = [line["val"]["iou"][TREES] for line in lines if "val" in line][-1:]
    return {
        **({HELD_OUT: held_out[0]} if held_out else {}),
        "steps": summary["steps"],
        "parameters": summary["parameters"],
        SECONDS: round(seconds, 1),
        "pixels": sum(line["pixels"] for line in lines if "pixels" in line),
    }


def call(place: Place, module: str, *arguments: str) -> str:
    """What the command prints. Raises CommunicationError where it fails."""
    done = run_process(python(module, *arguments), place.limit)
    if done.code:
        raise CommunicationError(f"{module} ended with code {done.code}: {done.reason}")
    return done.out


def result_file(folder: Path) -> Path:
    return folder / "result.json"


def read_result(folder: Path) -> dict[str, Any]:
    return json.loads(result_file(folder).read_text())


def write_result(folder: Path, found: dict[str, Any]) -> None:
    """Whole or not at all: a run whose result is there is not trained again."""
    draft = folder / "result.json.part"
    draft.write_text(json.dumps(found, indent=1) + "\n")
    draft.replace(result_file(folder))
