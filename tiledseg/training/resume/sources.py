"""The images of a run that goes on, compared with those of its checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tiledseg.checkpoint.saved_state import Source
from tiledseg.errors import CheckpointError
from tiledseg.raster.reading.identity import Identity, identify, written_since
from tiledseg.training.preparing.raster_set import RasterSet


@dataclass(frozen=True)
class Comparison:
    """A checkpoint's images beside the run's. `same`: all are there, in the same order, and none more; `added`: numbers
    of those that the checkpoint did not have; `rewritten`: paths of files that have changed; `before` and `now`: the
    paths by their keys, where the checkpoint has them."""

    same: bool
    added: tuple[int, ...]
    rewritten: tuple[str, ...]
    before: Mapping[str, list[str]]
    now: Mapping[str, list[str]]


def sources_of(rasters: RasterSet) -> tuple[Source, ...]:
    """Identify the images and labels of a run, as they are now."""
    images, labels = (
        [identify(path, info.beside) for path, info in zip(paths, infos, strict=True)]
        for paths, infos in ((rasters.images, rasters.infos), (rasters.labels, rasters.label_infos))
    )
    return tuple(map(Source, images, labels))


def rewritten_notes(learnt: Sequence[Source], judged: Sequence[Source]) -> list[str]:
    """Return a note of each file of training or validation that was written to since the run began."""
    files = [
        [each for source in sources for each in (source.image, source.labels) if each is not None]
        for sources in (learnt, judged)
    ]
    said, first = "was written to while the run read it", written_since(files[0])
    notes = [f"{path} {said}, which may have seen old and new values; train anew" for path in first]
    others = [path for path in written_since(files[1]) if path not in first]
    return [*notes, *(f"{path} {said}: scores may be of old and new pixels; evaluate its maps anew" for path in others)]


def hold_the_same(before: Sequence[Source], now: Sequence[Source]) -> bool:
    """Return True if both are the same images with the same labels, in whatever order and wherever they lie."""
    match = _match(before, now)
    pairs = [(now[new].image, before[old].image) for new, old in match.items()]
    pairs += [(now[new].labels, before[old].labels) for new, old in match.items()]  # type: ignore[misc]
    return len(match) == len(before) == len(now) and all(_equal(one, other) for one, other in pairs)


def _equal(one: Identity | None, other: Identity | None) -> bool:
    """Compare by content where it is known, else by path."""
    if one is None or other is None:
        return one is other
    return one.holds_what(other) or (one.is_at(other) and one.sample == other.sample)


def compare_sources(before: Sequence[Source], now: Sequence[Source], checkpoint: os.PathLike[str]) -> Comparison:
    """Compare the images of a checkpoint with the run's. Raises CheckpointError, with both values, where images of
    before are in another order or have other labels."""
    match = _match(before, now)
    for (one, was), (other, then) in pairwise(sorted(match.items())):
        if was > then:
            raise CheckpointError(
                f"{checkpoint} has data.images in another order: {before[then].image.path} before "
                f"{before[was].image.path} there, {now[one].image.path} before {now[other].image.path} in this run; "
                "keep the order, or give another run.output"
            )
    rewritten = []
    for new, old in sorted(match.items()):
        earlier, labels = before[old].labels, now[new].labels
        if earlier is None or labels is None:
            continue
        if not (labels.is_at(earlier) or labels.holds_what(earlier)):
            raise CheckpointError(
                f"{checkpoint} has other data.labels: those of {now[new].image.path} are {earlier.path} there and "
                f"{labels.path} in this run; use the same, or give another run.output"
            )
        pairs = (labels, earlier), (now[new].image, before[old].image)
        rewritten += [one.path for one, past in pairs if one.is_at(past) and one.changed_since(past)]
    same = len(match) == len(before) == len(now)
    added = tuple(i for i in range(len(now)) if i not in match)
    paths, own = _paths(before), _paths(now)
    return Comparison(same, added, tuple(dict.fromkeys(rewritten)), paths, {key: own[key] for key in paths})


def _paths(sources: Sequence[Source]) -> dict[str, list[str]]:
    images = {"data.images": [source.image.path for source in sources]} if sources else {}
    labels = [source.labels.path for source in sources if source.labels is not None]
    return {**images, "data.labels": labels} if labels else images


def _match(before: Sequence[Source], now: Sequence[Source]) -> dict[int, int]:
    """Match images of now with those of before: by path and content, then by content (moved), then by path
    (rewritten)."""
    rules: tuple[Callable[[Identity, Identity], bool], ...] = (
        lambda a, b: a.is_at(b) and (a.sample == b.sample or None in (a.sample, b.sample)),
        lambda a, b: a.holds_what(b),
        lambda a, b: a.is_at(b),
    )
    match: dict[int, int] = {}
    for rule in rules:
        for new in (new for new in range(len(now)) if new not in match):
            left = (old for old in range(len(before)) if old not in match.values())
            old = next((old for old in left if rule(now[new].image, before[old].image)), None)
            if old is not None:
                match[new] = old
    return match
