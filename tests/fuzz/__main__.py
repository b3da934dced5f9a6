"""`python -m tests.fuzz --cases 10000 --seed 1` damages images, or interrupts commands as they write, at random, and
prints a table of what came of it. `python -m tests.fuzz --seed 1 --case 37` shows one case again.

A case does not depend on those before it. An interrupted command is run again, undisturbed: it has to end as if nothing
had been.
"""

import argparse
import hashlib
import importlib
import json
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import rasterio

from benchmarks.forks import Interruption, Outcome, import_all, run_function
from tests.small_files import write_raster, write_yaml
from tiledseg.predict import main as predict
from tiledseg.scene import main as scene
from tiledseg.train import main as train

SIDE, TOUCHES = 32, 60  # pixels; the most times that a command touches a file
MAP = ["--checkpoint", "run", "--image", "image.tif", "--output", "map.tif", "--verbosity", "0", "--workers", "1"]
MAP += ["--tiling.grid", "2"]
STORE = ["--images", "image.tif", "--labels", "labels.tif", "--grid", "2", "--levels", "2", "--convs-per-level", "1"]
RUN = ["--config", "run.yaml", "--run.output", "out"]
SCENE = ["--size", "40", "40", "--image", "scene.tif", "--labels", "classes.tif"]
# Each command that writes a file: what is typed, and its outputs. Interrupted runs: tests/crash, benchmarks/faults.
WRITERS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "predict": (MAP, ("map.tif",)),
    "tile": ([*STORE, "--output", "new.h5"], ("new.h5",)),
    "scene": (SCENE, ("scene.tif", "classes.tif")),
}
COMMANDS = WRITERS | {"train": (RUN, ("out",))}
CONFIG = {
    "data": {"images": "image.tif", "labels": "labels.tif", "classes": 3, "workers": 1},
    "tiling": {"grid": 2},
    "model": {"levels": 2, "convs_per_level": 1, "base_channels": 2},
    "train": {"epochs": 1},
    "run": {"output": "run", "verbosity": 0},
}


@dataclass(frozen=True)
class Trial:
    """A command, and what befalls it: `damage` before it, in words, or an interruption."""

    command: str
    damage: str = ""
    interruption: Interruption | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        return COMMANDS[self.command][1]

    def run(self, folder: Path, interruption: Interruption | None = None) -> Outcome:
        return run(self.command, COMMANDS[self.command][0], folder, interruption)

    def result_faults(self, folder: Path) -> list[str]:
        """What is wrong with the outputs of an exit 0."""
        if self.command == "train":
            return _not_finished(folder / "out")
        if self.damage:
            return _not_map_of_its_pixels(folder)
        if self.command != "tile":
            return [fault for name in self.outputs for fault in not_same(folder, name)]
        done = run("predict", [*MAP, "--image", "new.h5"], folder)  # a store is whole where it maps as its image does
        return not_same(folder, "map.tif") if done.code == 0 else [f"new.h5 is torn: {done.err[:200]}"]


def run(command: str, arguments: list[str], folder: Path, interruption: Interruption | None = None) -> Outcome:
    """Run `python -m tiledseg.COMMAND ARGUMENTS` in `folder`."""
    main = importlib.import_module(f"tiledseg.{command}").main
    return run_function(lambda: int(main(arguments)), folder, interruption)


def make_material() -> int:
    """Rasters, a run of a step, and what undisturbed commands give of them, in the current folder."""
    draw = np.random.default_rng(5)
    labels_HW = np.kron(draw.integers(0, 3, (8, 8)), np.ones((4, 4))).astype(np.uint8)
    write_raster(Path("image.tif"), (draw.integers(0, 60, (3, SIDE, SIDE)) + 60 * labels_HW + 1).astype(np.uint8))
    write_raster(Path("labels.tif"), labels_HW[None])
    write_yaml(Path("run.yaml"), CONFIG)
    Path("reference").mkdir()
    codes = [train(["--config", "run.yaml"])]
    codes.append(predict([*MAP, "--output", "reference/map.tif"]))
    codes.append(scene([*SCENE, "--image", "reference/scene.tif", "--labels", "reference/classes.tif"]))
    return max(codes)


def draw_damage(draw: random.Random, folder: Path) -> Trial:
    """An image is damaged, or odd: its map is that of the pixels that are in it; or a run ends with a checkpoint."""
    damage = (_make_odd if draw.random() < 0.3 else _damage)(folder / "image.tif", draw)
    return Trial("train" if draw.random() < 0.25 else "predict", damage)


def draw_interruption(draw: random.Random, folder: Path) -> Trial:
    """A command meets a limit of size, or a signal: at a touch of a file, the same in each run of the case, or after a
    while."""
    way, name = draw.random(), draw.choice(("SIGKILL", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGTERM"))
    if way < 0.3:
        interruption = Interruption(largest_file=draw.choice((0, 1, 100, 1000, draw.randrange(60_000))))
    elif way < 0.75:
        interruption = Interruption(name, event=draw.randrange(1, TOUCHES))
    else:
        interruption = Interruption(name, seconds=draw.random() * 0.8)
    return Trial(draw.choice(list(WRITERS)), interruption=interruption)


KINDS: dict[str, Callable[[random.Random, Path], Trial]] = {
    "rasters": draw_damage,
    "interrupted writes": draw_interruption,
}


def _damage(path: Path, draw: random.Random) -> str:
    """Damage one to three places of a file: a bit flipped, bytes cut off, overwritten, moved or put in."""
    data = path.read_bytes()
    for _ in range(draw.choice((1, 1, 2, 3))):
        place, way = draw.randrange(len(data) + 1), draw.random()
        if way < 0.4 and data:
            place = draw.randrange(min(len(data), draw.choice((400, len(data)))))  # headers have few bytes
            changed = bytes([data[place] ^ (1 << draw.randrange(8))])
        else:
            changed = draw.choice((bytes(8), bytes(512), b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b"\n"))
        if way < 0.7:
            data = data[:place] + changed + data[place + len(changed) :]
        elif way < 0.85:
            data = data[:place] if draw.random() < 0.7 else data[:-1]
        else:
            data = data[:place] + draw.choice((data[place - 64 : place], draw.randbytes(16))) + data[place:]
    path.write_bytes(data)
    return f"bytes of {path.name}"


def _make_odd(path: Path, draw: random.Random) -> str:
    """Write an image of another kind."""
    with rasterio.open(path) as file:
        pixels = file.read()
    values = pixels.astype(np.float32)
    values[0, 3, 4] = draw.choice((np.nan, np.inf, 1e38))
    odd = {
        "dtype": pixels.astype(draw.choice(("uint16", "int16", "float32", "int8", "float64"))),
        "bands": draw.choice((pixels[:1], pixels[:2], np.concatenate([pixels, pixels]))),
        "size": pixels[:, : draw.randrange(1, SIDE), : draw.randrange(1, SIDE)],
        "value": values,
    }
    what = draw.choice([*odd])
    write_raster(path, odd[what], nodata=draw.choice((None, 0, 61)))
    return f"{what} of {path.name}"


def not_same(folder: Path, name: str) -> list[str]:
    """A fault where a file is not that of undisturbed commands, byte for byte."""
    path = folder / name
    is_same = path.exists() and path.read_bytes() == (folder / "reference" / name).read_bytes()
    return [] if is_same else [f"{name} is not that of undisturbed commands"]


def _not_finished(run: Path) -> list[str]:
    """A fault where a run of a step does not say that it is finished, or has no checkpoint of its end."""
    summary = run / "summary.json"
    if not summary.exists() or not json.loads(summary.read_text())["finished"]:
        return ["the run is not finished"]
    manifest = run / "checkpoints/step-000001/manifest.json"
    return [] if manifest.exists() else ["the run has no checkpoint of its end"]


def _not_map_of_its_pixels(folder: Path) -> list[str]:
    """Faults where the map is not that of a sound file with the pixels that the damaged one holds."""
    try:
        with rasterio.open(folder / "image.tif") as file:
            pixels, valid, profile = file.read(), file.dataset_mask(), file.profile
    except rasterio.errors.RasterioError as error:
        return [f"the file cannot be read: {error.__cause__ or error}"]
    sound = {key: profile[key] for key in ("nodata", "crs", "transform")}
    write_raster(folder / "sound.tif", pixels, **sound)
    again = run("predict", [*MAP, "--image", "sound.tif", "--output", "sound-map.tif"], folder)
    if again.code != 0:
        return [f"a sound file of the same pixels is refused: {again.err.strip()[:200]}"]
    with rasterio.open(folder / "map.tif") as ours, rasterio.open(folder / "sound-map.tif") as theirs:
        if valid.all() and not np.array_equal(ours.read(), theirs.read()):
            return ["the map is not that of the pixels in the file"]
        is_there = (ours.crs, ours.transform) == (theirs.crs, theirs.transform)
        return [] if is_there else ["the map lies elsewhere than the image"]


def judge(trial: Trial, folder: Path) -> tuple[Outcome, list[str]]:
    """Run a trial; return how it ends, and all that is wrong with that."""
    before = digests(folder)
    outcome = trial.run(folder, trial.interruption)
    if outcome.hung:
        return outcome, [f"hang: still running after {outcome.seconds:.0f} s"]
    faults = faults_of(trial, outcome, before, digests(folder))
    made = [name for name in trial.outputs if (folder / name).is_file()]  # a scene's image may be alone
    if outcome.code == 0 or (trial.interruption and made == [*trial.outputs]):
        faults += [f"exit {outcome.code}, but {fault}" for fault in trial.result_faults(folder)]
    may_repeat = outcome.code != 0 and not (trial.command == "tile" and made)  # no store is overwritten
    return outcome, faults + (repeated_faults(trial, folder) if trial.interruption and may_repeat else [])


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def faults_of(trial: Trial, outcome: Outcome, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What no command may do: a traceback, an unforeseen error, another exit code, a refusal of no or many lines,
    inputs that change, files that are left. A kill may leave unfinished ones: the next run clears them."""
    faults, lines = [], outcome.err.splitlines()
    killed = outcome.code == -signal.SIGKILL and trial.interruption is not None
    if "Traceback (most recent call last)" in outcome.err:
        faults.append("traceback on standard error")
    if "(unforeseen;" in outcome.err:
        faults.append("unforeseen error")
    if outcome.code not in (0, 1, 2, 75) and not killed:
        faults.append(f"exit code {outcome.code}")
    errors = [line for line in lines if line.startswith("error: ")]
    if outcome.code in (1, 2) and (len(errors) != 1 or lines[-1] != errors[0]):
        faults.append(f"exit {outcome.code} with {len(errors)} lines of error")
    outputs = () if outcome.code == 2 else trial.outputs
    runs = tuple(f"{name}/" for name in outputs)
    beside = {str(Path(name).with_suffix(".qml")) for name in outputs} | {f"{name}.aux.xml" for name in outputs}
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    for name in sorted(name for name in changed - {*outputs, *beside} if not name.startswith(runs)):
        if name in before:
            faults.append(f"input changed: {name}")
        elif not (killed and ".part" in name):
            faults.append(f"left over: {name}")
    return faults


def repeated_faults(trial: Trial, folder: Path) -> list[str]:
    """The same command again gives the whole result, and clears the rest."""
    again = trial.run(folder)
    if again.hung or again.code != 0:
        return [f"again: exit {again.code}: {again.err.strip()[:300]}"]
    left = [path.name for path in folder.rglob("*") if path.name.startswith(".") or ".part" in path.name]
    faults = [f"again: {fault}" for fault in trial.result_faults(folder)]
    return faults + [f"left over after the second run: {name}" for name in left]


def main() -> int:
    """Print every fault with the command that shows it again, and the table; return 1 where there is a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="one case alone")
    flags = parser.parse_args()
    import_all()
    ends, faulty = defaultdict[str, Counter[str]](Counter), 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        pristine, folder = Path(name, "pristine"), Path(name, "case")
        pristine.mkdir()
        made = run_function(make_material, pristine, limit=300)
        assert made.code == 0, f"the material cannot be made: {made.err}"
        for number in range(flags.cases) if flags.case is None else [flags.case]:
            kind = list(KINDS)[number % len(KINDS)]
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(pristine, folder)
            trial = KINDS[kind](random.Random(f"{flags.seed} {number} {kind}"), folder)
            outcome, faults = judge(trial, folder)
            ends[kind]["hang" if outcome.hung else str(outcome.code) if outcome.code >= 0 else "killed"] += 1
            faulty += bool(faults)
            if faults or flags.case is not None:
                print(f"python -m tests.fuzz --seed {flags.seed} --case {number}: {kind}: {trial}")
                print("\n".join(f"    {line}" for line in (*faults, outcome.err.strip()[-300:])))
    print(f"python -m tests.fuzz --seed {flags.seed} --cases {flags.cases}: {faulty} faults")
    for kind, counts in ends.items():
        print(f"| {kind} | {', '.join(f'{count} x {word}' for word, count in sorted(counts.items()))} |")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
