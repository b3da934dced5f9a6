"""`python -m tests.fuzz --cases 10000 --seed 1`: random damage of all kinds against every command, and a table of what
came of it. One case again: `python -m tests.fuzz --seed 1 --case 37`.

What case N of a seed does never depends on the others.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from benchmarks.forks import Outcome, import_all, run_function
from tests.fuzz.trials import KINDS, Trial, aftermath, make_material, run


def main() -> int:
    """Print every fault with the command that shows it again, and the table; return 1 where there is a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="one case alone")
    flags = parser.parse_args()
    import_all()
    ends, faulty = defaultdict(Counter), 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        root = Path(name)
        (root / "pristine").mkdir()
        made = run_function(make_material, root / "pristine", limit=300)
        assert made.code == 0, f"the material cannot be made: {made.err}"
        for number in range(flags.cases) if flags.case is None else [flags.case]:
            kind = list(KINDS)[number % len(KINDS)]
            trial = KINDS[kind](random.Random(f"{flags.seed} {number} {kind}"), fresh(root))
            outcome, faults = judge(trial, root / "case")
            ends[kind][word_of(outcome)] += 1
            if faults or flags.case is not None:
                faulty += bool(faults)
                print(f"python -m tests.fuzz --seed {flags.seed} --case {number}: {kind}: {trial.words}")
                typed = f"{trial.command} {' '.join(trial.arguments)}"
                print("\n".join(f"    {line}" for line in (*faults, typed, outcome.err.strip()[-300:])))
    print(f"python -m tests.fuzz --seed {flags.seed} --cases {flags.cases}: {faulty} faults")
    for kind, counts in ends.items():
        print(f"| {kind} | {', '.join(f'{count} x {word}' for word, count in sorted(counts.items()))} |")
    return 1 if faulty else 0


def fresh(root: Path) -> Path:
    """The case's folder as it was made, whatever the case before has done to it."""
    shutil.rmtree(root / "case", ignore_errors=True)
    return Path(shutil.copytree(root / "pristine", root / "case"))


def judge(trial: Trial, case: Path) -> tuple[Outcome, list[str]]:
    """Run a trial; return how it ends, and all that is wrong with that."""
    before = digests(case)
    outcome = run(trial.command, trial.arguments, case, trial.interruption)
    if outcome.hung:
        return outcome, [f"hang: still running after {outcome.seconds:.0f} s"]
    faults = common_faults(trial, outcome) + faults_of_files(trial, outcome, before, digests(case))
    if trial.interruption is not None:
        faults += aftermath(trial, outcome, case)
    elif outcome.code == 0:
        faults += [f"exit 0, but {fault}" for fault in trial.check(case)]
    return outcome, faults


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder, and a word for what is no file."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif not path.is_dir():
            found[str(path.relative_to(folder))] = "no file"
    return found


def common_faults(trial: Trial, outcome: Outcome) -> list[str]:
    """What no command may do, whatever it was given."""
    faults, lines = [], outcome.err.splitlines()
    if "Traceback (most recent call last)" in outcome.err:
        faults.append("traceback on standard error")
    if outcome.code not in (0, 1, 2, 75) and not was_killed(trial, outcome):
        faults.append(f"exit code {outcome.code}")
    errors = [line for line in lines if line.startswith("error: ")]
    if outcome.code in (1, 2) and (len(errors) != 1 or lines[-1] != errors[0]):
        faults.append(f"exit {outcome.code} with {len(errors)} lines of error")
    return faults


def was_killed(trial: Trial, outcome: Outcome) -> bool:
    return outcome.code == -signal.SIGKILL and trial.interruption is not None


def faults_of_files(trial: Trial, outcome: Outcome, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Inputs that changed, and files that were left. A kill may leave unfinished ones: the next run clears them."""
    killed, faults = was_killed(trial, outcome), []
    allowed = () if outcome.code == 2 else trial.outputs
    maps = [Path(name) for name in allowed if trial.command in ("predict", "scene")]  # GDAL and QGIS read names beside
    allowed += tuple(str(name) for path in maps for name in (path.with_suffix(".qml"), Path(f"{path}.aux.xml")))
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name):
            continue
        is_output = any(name == one or name.startswith(f"{one}/") for one in allowed)
        if name in before:
            faults += [] if is_output else [f"input changed: {name}"]
        elif not is_output:
            faults += [] if killed and ".part" in name else [f"left over: {name}"]
        elif not killed and any(part.startswith(".") for part in Path(name).parts) and "lock" not in Path(name).name:
            faults.append(f"left over: {name}")
    return faults


def word_of(outcome: Outcome) -> str:
    if outcome.hung:
        return "hang"
    if outcome.code == 1 and "(unforeseen;" in outcome.err:
        return "1, unforeseen"
    return str(outcome.code) if outcome.code >= 0 else "killed"


if __name__ == "__main__":
    sys.exit(main())
