"""Scaling studies: the predicted time of a run on more ranks, strong (of one step) and weak (of larger steps).

Both keep the mode that is best on the first number: efficiencies compare a mode with itself. Strong: the step keeps its
images, so the result stays the same, and each number of ranks has its best settings. Weak: the images of a step grow
with the ranks, up to those of an epoch, and the settings of an image stay those of the first number.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from tiledseg.config.checks import MOST
from tiledseg.errors import ConfigError
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.search.best import TERMS, search
from tiledseg.planning.search.price import Discarded, Priced, Pricing
from tiledseg.planning.search.space import FREE


@dataclass(frozen=True)
class Point:
    """A number of ranks: images of a step, its settings, `efficiency` per rank (1: as on the first number), and the
    term that takes most of the loss; None where nothing is lost."""

    ranks: int
    images: int
    priced: Priced
    efficiency: float
    limit: str | None


def parse_range(text: str) -> tuple[int, ...]:
    """Parse 'A:B' into the GPU counts A, 2A, 4A, ..., B. Raises ConfigError for anything else."""
    words = text.split(":")
    if len(words) != 2 or not all(word.isascii() and word.isdigit() and len(word) < 8 for word in words):
        raise ConfigError(f"--scaling is '{text}'; give the fewest and the most GPUs, 64:1536 say")
    first, last = map(int, words)
    if not 1 <= first < last <= 1_000_000:
        raise ConfigError(f"--scaling is '{text}'; give two numbers that rise, from 1 to 1000000")
    doubled = [first << power for power in range(20) if first << power < last]
    return (*doubled, last)


def strong(question: RunQuestion, numbers: tuple[int, ...], host: int) -> list[Point]:
    """Return the best settings of each number in the mode of the first; `host`: ranks of one host, which pipelines do
    not leave."""
    found = [_best(replace(question, ranks=numbers[0]), host)]
    first = found[0].candidate
    parallel = replace(question.parallel, halo=first.halo, stages=first.stages)
    for ranks in numbers[1:]:
        found.append(_best(replace(question, ranks=ranks, parallel=parallel), host, FREE - {"halo", "stages"}))
    return [_point(numbers, k, question.images_per_step, found, numbers[k] / numbers[0]) for k in range(len(numbers))]


def quicker(question: RunQuestion, last: Point, host: int) -> Priced | None:
    """Return the best settings of another mode on as many ranks, where they take less time than those of the study."""
    found = _best(replace(question, ranks=last.ranks), host)
    return found if found.seconds < last.priced.seconds else None


def _best(question: RunQuestion, host: int, free: Collection[str] = FREE) -> Priced:
    return search(question, host, free=free).winner


def weak(question: RunQuestion, numbers: tuple[int, ...], first: Priced, most: int = MOST) -> list[Point]:
    """Return a step of the first number's images for each time that many ranks, with its settings; of at most so many
    images."""
    found, images = [first], [question.images_per_step]
    for ranks in numbers[1:]:
        step = question.images_per_step * ranks // numbers[0]
        if step > most:
            break
        images.append(step)
        asked = replace(question, ranks=ranks, images_per_step=step)
        priced = Pricing(asked).price(first.candidate)
        if isinstance(priced, Discarded):
            raise ConfigError(f"{first.in_words} on {ranks} ranks: {priced.reason}")
        found.append(priced)
    shares = [numbers[k] / numbers[0] * images[0] / images[k] for k in range(len(found))]
    return [_point(numbers, k, images[k], found, share) for k, share in enumerate(shares)]


def _point(numbers: tuple[int, ...], k: int, images: int, found: list[Priced], times: float) -> Point:
    """Return point `k`, whose ranks would have `times` less work each than on the first number, were none lost."""
    first, priced = found[0], found[k]
    lost = {name: mine - one / times for name, mine, one in zip(TERMS, priced.time, first.time, strict=True)}
    most = max(lost, key=lambda name: lost[name])
    idle = 1 - priced.ranks / numbers[k]
    efficiency = first.seconds / times / priced.seconds
    limit = TERMS[most] if lost[most] > 0.001 * priced.seconds else None
    if limit and idle > 0.05 and most in ("forward", "backward"):
        limit = f"{100 * idle:.2g} % of the ranks idle"
    elif limit and most in ("forward", "backward"):
        limit = "computing: halos, uneven shares"
    return Point(numbers[k], images, priced, efficiency, limit)
