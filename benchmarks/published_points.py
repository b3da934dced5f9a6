"""What the cost model says of the published runs on Summit, with nothing fitted to them: `docs/plan.md` has the table.

    python -m benchmarks.published_points

Takes a minute, without torch. The V100's figures are those of its datasheet
(`tiledseg/user_files/machines/summit.yaml`).
"""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

from tiledseg.plan import main as plan

RASTER = "--size 10000 --machine summit"
BALANCES = {"small": "[14,24,30,22,12,7]", "medium-2": "[16,26,38,26,12,11]", "large": "[18,30,44,30,14,13]"}


def ask(line: str) -> dict[str, Any]:
    """The answer of `plan` to these flags."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = plan([*line.split(), "--format", "json"])
    if code:
        raise SystemExit(code)
    return json.loads(said.getvalue())


def epochs() -> None:
    for gpus, images in ((8, 1), (64, 1), (1200, 18), (1536, 24)):
        asked = f"--search --grid 8 --gpus {gpus} --images 100 --images-per-step {images} {RASTER}"
        part = ask(asked)["search"]
        rows = [*part["best"], *filter(None, [part["other"]])]
        read = next(row for row in rows if row["settings"].startswith("read"))
        best = part["best"][0]
        print(
            f"{gpus} GPUs: read {read['epoch_seconds']:.4g} s an epoch; {best['settings']} {best['epoch_seconds']:.4g}"
        )


def tilings() -> None:
    """The coarsest that fit, of all and of those whose tiles are equal: 10000 px are cut so by 5 and by 8, not by 6."""
    for network in ("", "--padding valid --norm batch"):
        fit = []
        for grid in (4, 5, 6, 7, 8, 10):
            answer = ask(f"--grid {grid} --gpu-memory 16GiB {network} {RASTER}")
            memory, work = answer["memory"], answer["exact"]["efficiency"]
            fit += [grid] * memory["fits"]
            told = "" if memory["fits"] else ", does not fit"
            print(f"{grid} x {grid} {network}: {memory['total'] / 2**30:.2f} GiB{told}, E {work:.3f}")
        equal = [grid for grid in fit if 10000 % grid == 0]
        print(f"coarsest that fits: {fit[0]} x {fit[0]}; with equal tiles {equal[0]} x {equal[0]}")


def pipelines() -> None:
    for model, balance in BALANCES.items():
        for side in (192, 512, 1024):
            asked = f"--size {side} --grid 1 --model {model} --stages 6 --schedule gpipe --machine summit"
            found = {
                (count, given): ask(f"{asked} --micro-batches {count} --balance {given}")["stages"]["step"]["speed_up"]
                for count in (6, 24)
                for given in (balance, "auto")
            }
            by_hand, auto = ([found[count, given] for count in (6, 24)] for given in (balance, "auto"))
            print(f"{model}, {side} px: by hand {by_hand[0]:.2f}, {by_hand[1]:.2f}; auto {auto[0]:.2f}, {auto[1]:.2f}")


if __name__ == "__main__":
    epochs()
    tilings()
    pipelines()
