"""The start of a run: new, or from a checkpoint with the changes that docs/reference/resume.md allows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

from tiledseg.architecture.presets import FIRST, described
from tiledseg.checkpoint.folder import Checkpoint, name_of
from tiledseg.checkpoint.saved_state import Best, Resumed, SavedState, Source
from tiledseg.config.checks import shown
from tiledseg.config.data import read_split
from tiledseg.config.words import read_loss, read_policy
from tiledseg.errors import CheckpointError
from tiledseg.raster.reader import Identity, identify, written_since
from tiledseg.system.outputs import CHECKPOINTS
from tiledseg.training.preparation import Preparation
from tiledseg.training.raster_set import RasterSet

OTHER_RUN, NAMES_RUN = "refused", "allowed"
_FIXED_KEYS = {
    "data": (
        *("classes", "label_layer", "label_attribute", "background", "area", "split"),
        *("ignore_index", "nodata", "bands", "normalize", "assets", "mosaic", "valid", "valid_values"),
    ),
    "model": (
        *("name", "levels", "convs_per_level", "kernel", "base_channels", "padding", "norm", "upsampling"),
        *("dropout", "encoder", "pretrained", "build", "arguments", "series", "window", "overlap", "blend", "ends"),
    ),
    "optimizer": ("name",),
}
RULES = {
    **{f"{group}.{key}": OTHER_RUN for group, keys in _FIXED_KEYS.items() for key in keys},
    **dict.fromkeys(("data.images", "data.labels"), "sources"),
    "tiling.grid": "grids",
    "train.tiles_per_step": "tiles_per_step",
    "train.images_per_step": "images_per_step",
    "train.seed": "seed",
    "train.windows": "windows",
    **{f"train.{key}": "content" for key in ("skip_empty", "balance_classes")},
    **dict.fromkeys(("train.resume", "run.output", "run.verbosity"), NAMES_RUN),
}
"""Rules for the keys of a resumed run. `OTHER_RUN`: must not change. `NAMES_RUN`: is not compared. Any other rule is
an entry of `sampling_fingerprint`: the key orders the steps, and may change between epochs. A key without a rule may
always change; a warning lists the changes."""


def begin(checkpoint: Checkpoint | None, preparation: Preparation) -> None:
    """Compare a run with the checkpoint that it resumes, and set where it begins. Raises CheckpointError if it would be
    another run."""
    preparation.sources = sources = sources_of(preparation.training)
    if checkpoint is None:
        return
    saved = checkpoint.saved
    there, here = ({"kind": FIRST, **described(of.network)} for of in (saved, preparation.plan))
    for key, value in there.items():  # `kind` comes first: the other keys depend on it
        if here[key] != value:
            raise CheckpointError(
                f"{checkpoint.path} is of another model: {key} is {value} there and {here[key]} in this run; "
                "use the same model and data keys, or another run.output"
            )
    paths = saved.sampling.get("images")
    before = saved.sources or tuple(Source(Identity(str(path)), None) for path in paths or ())  # of older versions
    preparation.added, rewritten, same = compare_sources(before, sources, checkpoint.path)
    changed = _changed(checkpoint, preparation, same, before, sources)
    position, epochs, an_epoch = saved.position, preparation.epochs, preparation.sampler.steps_per_epoch
    if position > (epochs, 0):
        done = f"{position.epoch} epochs" + (f" and {position.step} steps" if position.step else "")
        raise CheckpointError(
            f"{checkpoint.path} has done {done}, but train.epochs is {epochs}; give at least "
            f"{position.epoch + (position.step > 0)}, or another run.output"
        )
    if position.step >= an_epoch:
        raise CheckpointError(
            f"{checkpoint.path} stands at step {position.step} of an epoch, but an epoch of this run has {an_epoch}; "
            "give another run.output"
        )
    preparation.best, notes = _best(saved, preparation)
    preparation.resumed = saved.resumed
    if changed or rewritten:
        preparation.resumed += (Resumed(saved.step, changed, rewritten),)
    warnings = [
        f"{fault.partition('; use')[0]}; going on from {checkpoint.path.name}" for fault in checkpoint.passed_over
    ]
    if changed:
        words = [f"{key} from {_short(pair['from'])} to {_short(pair['to'])}" for key, pair in changed.items()]
        warnings.append(f"changed since step {saved.step}: {', '.join(words)}")
    if rewritten:
        more = f" and {len(rewritten) - 1} more files have" if len(rewritten) > 1 else " has"
        warnings.append(
            f"{rewritten[0]}{more} been written to since step {saved.step}; the normalisation stays that of before"
        )
    preparation.checkpoint = checkpoint
    preparation.pretrained, preparation.normalization = saved.pretrained, saved.normalization
    if preparation.counts_classes and "train.class_weights" not in changed:
        preparation.class_weights = saved.class_weights
    preparation.warnings += [*warnings, *notes]


def sampling_fingerprint(preparation: Preparation) -> dict[str, Any]:
    """Return the facts that the order of the steps depends on; they must not change within an epoch."""
    per_step, images = preparation.question.tiles_per_step, preparation.question.images_per_step
    windows, content = preparation.question.windows, preparation.by_content
    return {
        "seed": preparation.config.train.seed,
        "images": list(preparation.training.images),
        "tiles_per_step": per_step,
        "grids": [list(t.grid) for t in preparation.training.tilings] if per_step is not None and not windows else None,
        "images_per_step": images if images > 1 else None,
        "windows": asdict(windows) if windows else None,
        "content": list(content) if content else None,
    }


def _changed(
    checkpoint: Checkpoint, preparation: Preparation, same: bool, before: Sequence[Source], sources: Sequence[Source]
) -> dict[str, dict[str, Any]]:
    """Return the keys whose values differ from the checkpoint's, as {"from": ..., "to": ...}; raise CheckpointError for
    a key that must not change. `same`: the images, `before` there and `sources` here, are the same."""
    saved, order = checkpoint.saved, sampling_fingerprint(preparation)
    there, here = flat(saved.config.record()), flat(preparation.user_config.record())
    for key, paths in _paths(before).items():
        if paths:  # older checkpoints may have none
            there[key], here[key] = paths, _paths(sources)[key]
    reads = (("train.loss", read_loss), ("optimizer.policy", read_policy), ("data.split", read_split))
    alike = {key for key, read in reads if read(there[key]) == read(here[key])}
    alike |= {"data.classes"} if saved.label_map == preparation.label_map else set()
    changed = {}
    for key in here:
        before, now, rule = there[key], here[key], RULES.get(key)
        # `begin` has compared the network as a whole.
        if key.startswith("model.") and key != "model.pretrained":
            continue
        if before == now or (before != before and now != now) or key in alike or rule == NAMES_RUN:
            continue
        changed[key] = {"from": before, "to": now}
        if key == "data.classes" and saved.label_map.agrees(preparation.label_map):
            continue  # only names or colours differ
        refusal = "is of another run" if rule == OTHER_RUN else None
        if rule not in (OTHER_RUN, None) and saved.position.step > 0:
            differs = not same if rule == "sources" else saved.sampling.get(rule) != order[rule]
            refusal = "stands in the middle of an epoch of other steps" if differs else None
        if refusal:
            raise CheckpointError(
                f"{checkpoint.path} {refusal}: {key} is {_short(before)} there and {_short(now)} in this run; use the "
                "same, or another run.output"
            )
    return changed


def _best(saved: SavedState, preparation: Preparation) -> tuple[Best | None, tuple[str, ...]]:
    """Return the best validation so far by the run's score; None and a note if its checkpoint is gone."""
    best = saved.best
    if best is None or best.score != preparation.config.train.best:
        return None, ()
    path = Path(preparation.config.run.output) / CHECKPOINTS / name_of(best.step)
    assert preparation.validation is not None, "a run with a score is validated"
    there, here = (  # fingerprints of images and labels, which do not depend on their paths
        sorted([each.sample or os.path.realpath(each.path) for each in _files(source)] for source in of)
        for of in (saved.judged, sources_of(preparation.validation))
    )
    fault = "was found on other validation images" if path.is_dir() else "is not there"
    anew = f"{path}, of the best {best.score}, {fault}: the best begins anew"
    return (best, ()) if there == here and path.is_dir() else (None, (anew,))


def flat(record: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a configuration's values by "group.key"."""
    return {f"{group}.{key}": value for group, keys in record.items() for key, value in keys.items()}


def _short(value: Any) -> str:
    return "null" if value is None else str(value) if isinstance(value, int | float | str) else shown(repr(value))


def sources_of(rasters: RasterSet) -> tuple[Source, ...]:
    """Identify the images and labels of a run, as they are now."""
    images = (identify(path, info.beside) for path, info in zip(rasters.images, rasters.infos, strict=True))
    labels = (identify(path, info.beside) for path, info in zip(rasters.labels, rasters.label_infos, strict=True))
    return tuple(map(Source, images, labels))


def rewritten_notes(learnt: Sequence[Source], judged: Sequence[Source]) -> list[str]:
    """Return a note for each training or validation file that was written to since the run began."""
    files = [[each for source in sources for each in _files(source)] for sources in (learnt, judged)]
    said, first = "was written to while the run read it", written_since(files[0])
    notes = [f"{path} {said}, which may have seen old and new values; train anew" for path in first]
    others = [path for path in written_since(files[1]) if path not in first]
    return [*notes, *(f"{path} {said}: scores may be of old and new pixels; evaluate its maps anew" for path in others)]


def compare_sources(
    before: Sequence[Source], now: Sequence[Source], checkpoint: PathLike[str]
) -> tuple[tuple[int, ...], list[str], bool]:
    """Compare the images of a checkpoint with the run's. Return the numbers of new images, the files rewritten since,
    and True if the images are the same. Raises CheckpointError if known images have another order or other labels."""

    def is_unchanged(one: Identity, other: Identity) -> bool:
        return one.is_at(other) and (one.sample == other.sample or None in (one.sample, other.sample))

    match: dict[int, int] = {}  # number now -> number before
    for rule in (is_unchanged, Identity.holds_what, Identity.is_at):  # unchanged, moved, rewritten
        for new in (new for new in range(len(now)) if new not in match):
            left = (old for old in range(len(before)) if old not in match.values())
            old = next((old for old in left if rule(now[new].image, before[old].image)), None)
            if old is not None:
                match[new] = old
    for (first, old_first), (second, old_second) in pairwise(sorted(match.items())):
        if old_first > old_second:
            raise CheckpointError(
                f"{checkpoint} has data.images in another order: {before[old_second].image.label} before "
                f"{before[old_first].image.label} there, {now[first].image.label} before {now[second].image.label} "
                "in this run; "
                "keep the order, or give another run.output"
            )
    rewritten = []
    for new, old in sorted(match.items()):
        earlier, labels = before[old].labels, now[new].labels
        if earlier is None or labels is None:
            continue
        if not (labels.is_at(earlier) or labels.holds_what(earlier)):
            raise CheckpointError(
                f"{checkpoint} has other data.labels: those of {now[new].image.label} are {earlier.label} there "
                f"and {labels.label} in this run; use the same, or give another run.output"
            )
        pairs = (labels, earlier), (now[new].image, before[old].image)
        rewritten += [one.label for one, past in pairs if one.is_at(past) and one.changed_since(past)]
    added = tuple(i for i in range(len(now)) if i not in match)
    return added, list(dict.fromkeys(rewritten)), len(match) == len(before) == len(now)


def _paths(sources: Sequence[Source]) -> dict[str, list[str]]:
    """Return the paths of images and labels by their keys."""
    labels = [source.labels.path for source in sources if source.labels is not None]
    return {"data.images": [source.image.path for source in sources], "data.labels": labels}


def _files(source: Source) -> list[Identity]:
    return [each for each in (source.image, source.labels) if each is not None]
