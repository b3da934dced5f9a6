"""The kinds of faults: how one is drawn, and by which exit codes and words the program has to answer it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

STEPS, EVERY = 12, 3
"""Steps of the run, and from checkpoint to checkpoint."""
TILES = 4
"""Of a step."""
PER_NODE = 2
"""Ranks, where nodes are lost."""
MPIRUN_EVERY = 35
"""Of so many cases one goes through mpirun, on several ranks, from the start of their processes."""


@dataclass(frozen=True)
class Moment:
    """Rank `rank`, or `ranks` of them from there on, meet the act `act`, which gets the number `draw`: in step `step`,
    or where `save` is above 0 at the `save`-th touch of a file that is not a checkpoint yet."""

    act: str
    rank: int
    step: int = 0
    save: int = 0
    draw: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class Trial:
    """One fault. `stopped`: how the run is ended before, and the fault met by the next start; else it is met by the run
    in `moment`. `at_rest`: what happens to the files in between. `left`: on how many ranks the run goes on, which says
    that the others are lost with their node. `mpirun`: real starts; else the ranks are forks."""

    kind: str
    ranks: int
    moment: Moment | None
    stopped: Moment | None = None
    at_rest: tuple[str, int] | None = None
    left: int = 0
    mpirun: bool = False


@dataclass(frozen=True)
class Kind:
    """`codes`: with which the run may end, of one rank and of several; `words`: a pattern that standard error holds,
    unless the exit code is the signal that left nobody to say anything. `may_miss`: a run that has read all it needs
    may also end with exit 0, and the losses of the undisturbed one. `harms`: the program says what it met and goes on
    with it, as its pages say; the run is put back to where it met the fault. `options`: of the command line."""

    draw: Callable[[random.Random, int], Trial]
    codes: tuple[int, ...]
    words: str
    ranks: tuple[int, ...] = (1, 1, 1, 1, 2)
    may_miss: bool = False
    harms: bool = False
    options: tuple[str, ...] = ()


def _in_step(kind: str, act: str, any_rank: bool = True) -> Callable[[random.Random, int], Trial]:
    def draw(drawn: random.Random, ranks: int) -> Trial:
        rank = drawn.randrange(ranks) if any_rank else 0
        return Trial(kind, ranks, Moment(act, rank, drawn.randrange(1, STEPS - 1), draw=drawn.randrange(2**20)))

    return draw


def _full_disk(drawn: random.Random, ranks: int) -> Trial:
    return Trial("full disk", ranks, Moment("limit", 0, drawn.randrange(1, STEPS - 1), draw=drawn.randrange(3000)))


def _bad_value(drawn: random.Random, ranks: int) -> Trial:
    """While at least an epoch is left, in which the tile is read again."""
    moment = Moment("write 3e38", 0, drawn.randrange(1, STEPS - 3), draw=drawn.randrange(2**20))
    return Trial("value that no loss stands", ranks, moment)


def _in_save(drawn: random.Random, ranks: int) -> Trial:
    return Trial("kill in a save", ranks, Moment("kill", 0, save=drawn.randrange(1, 20)))


def _lost_node(drawn: random.Random, ranks: int) -> Trial:
    """All ranks of one node are killed in the same step, and the run goes on without them."""
    first = drawn.randrange(0, ranks, PER_NODE)
    lost = min(PER_NODE, ranks - first)
    moment = Moment("kill", first, drawn.randrange(1, STEPS - 1), ranks=lost)
    return Trial("lost node", ranks, moment, left=ranks - lost)


def _at_rest(
    kind: str, *acts: str, first: int = 1, ends: tuple[str, ...] = ("usr1", "kill")
) -> Callable[[random.Random, int], Trial]:
    """The run is ended in step `first` or later, by a signal of `ends`; then a file is damaged."""

    def draw(drawn: random.Random, ranks: int) -> Trial:
        stop = Moment(drawn.choice(ends), drawn.randrange(ranks), drawn.randrange(first, STEPS - 1))
        return Trial(kind, ranks, None, stop, (drawn.choice(acts), drawn.randrange(2**20)))

    return draw


_LOST = r"error: .*(rank {rank} on [^;:]+|ranks [\d ,and-]*{rank}[\d ,and-]*) not answering"
_OF_KILL = rf"signal 9|{_LOST}"
"""What mpirun says, and what the other ranks say where nobody ends them."""
_SHORT = ("--parallel.deadline", "4")
_JUDGED = ("--data.val_images", "val.tif", "--data.val_labels", "labels.tif", "--train.validate_every", "2")
_TWO_SAVES = 2 * EVERY + 2
KINDS: dict[str, Kind] = {
    "kill -9": Kind(_in_step("kill -9", "kill"), (-9, 137), _OF_KILL),
    "SIGTERM": Kind(_in_step("SIGTERM", "term"), (75,), r"stopped early after step \d+, by a signal"),
    "SIGUSR1": Kind(_in_step("SIGUSR1", "usr1"), (75,), r"stopped early after step \d+, by a signal"),
    "stuck rank": Kind(
        _in_step("stuck rank", "stop"),
        (1,),
        _LOST,
        ranks=(2,),
        options=_SHORT,
    ),
    "lost node": Kind(_lost_node, (-9, 137), _OF_KILL, ranks=(3, 4)),
    "full disk": Kind(_full_disk, (1,), r"error: .*cannot write .*run.*File too large"),
    "kill in a save": Kind(_in_save, (-9, 137), _OF_KILL),
    "damaged checkpoint": Kind(
        _at_rest("damaged checkpoint", "flip checkpoint", "cut checkpoint", first=_TWO_SAVES), (0, 2), r"step-0000"
    ),
    "raster cut": Kind(_at_rest("raster cut", "cut raster"), (2,), r"error: .*image\.tif"),
    "raster cut while it is read": Kind(
        _in_step("raster cut while it is read", "cut raster", False), (1, 2), r"error: .*image\.tif", may_miss=True
    ),
    "raster of other values": Kind(
        _at_rest("raster of other values", "write NaN", "write 3e38", ends=("usr1",)),
        (0, 1),
        r"warning: .*image\.tif",
        harms=True,
    ),
    "raster rewritten while it is read": Kind(
        _in_step("raster rewritten while it is read", "write 7", False),
        (0,),
        r"warning: .*image\.tif was written to",
        harms=True,
    ),
    "validation raster rewritten": Kind(
        _in_step("validation raster rewritten", "write validation", False),
        (0,),
        r"warning: .*val\.tif was written to",
        options=_JUDGED,
    ),
    "value that no loss stands": Kind(_bad_value, (1,), r"error: the (loss|gradient).*image\.tif"),
    "raster gone": Kind(_in_step("raster gone", "move raster", False), (1, 2), r"error: .*image\.tif", may_miss=True),
    "checkpoints gone": Kind(_at_rest("checkpoints gone", "move checkpoints", ends=("usr1",)), (2,), r"error: .*run"),
    "run folder gone": Kind(_in_step("run folder gone", "move run", False), (1,), r"error: .*cannot write .*run"),
    "metrics cut": Kind(_at_rest("metrics cut", "cut metrics", ends=("usr1",)), (2,), r"error: .*metrics\.jsonl"),
}


def draw_trial(seed: int, number: int) -> Trial:
    """Case `number` of a seed; the kinds take turns."""
    name = list(KINDS)[number % len(KINDS)]
    drawn = random.Random(f"{seed} {number} {name}")
    mpirun = number % MPIRUN_EVERY == 0
    ranks = drawn.choice([ranks for ranks in KINDS[name].ranks if ranks > 1 or not mpirun])
    return replace(KINDS[name].draw(drawn, ranks), mpirun=mpirun)
