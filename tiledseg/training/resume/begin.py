"""The beginning of a run: anew, or from a checkpoint, with the changes that the keys below allow (docs/resume.md).

A key that is not named here may change from the checkpoint on: it changes speed and memory alone, or a change of the
result is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tiledseg.architecture.kinds import FIRST, described
from tiledseg.checkpoint.check import Checkpoint
from tiledseg.checkpoint.folder import name_of
from tiledseg.checkpoint.saved_state import Best, Origin, Resumed, SavedState, Source
from tiledseg.config.checks import shown
from tiledseg.config.words import read_loss, read_policy, split_recompute
from tiledseg.errors import CheckpointError
from tiledseg.raster.reading.identity import Identity
from tiledseg.system.outputs import CHECKPOINTS
from tiledseg.training.preparing.preparation import Preparation
from tiledseg.training.resume.sources import Comparison, compare_sources, hold_the_same, sources_of

_RECOMPUTE = "memory.recompute", "parallel.recompute"


@dataclass(frozen=True)
class Beginning:
    """The start of a run: a checkpoint, or None; its images as they are now; where it was resumed with changes, this
    time the last; the images, by number, that the checkpoint did not know; warnings for the user; the file of
    pretrained weights that the run began with; and its best validation so far."""

    checkpoint: Checkpoint | None
    sources: tuple[Source, ...]
    resumed: tuple[Resumed, ...] = ()
    added: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()
    pretrained: Origin | None = None
    best: Best | None = None

    @property
    def has_class_weights(self) -> bool:
        """True if the checkpoint has the weights of classes for this run's key, which has not changed since."""
        if self.checkpoint is None or not self.checkpoint.saved.class_weights:
            return False
        step = self.checkpoint.saved.step
        return not any(r.step == step and "train.class_weights" in r.changed for r in self.resumed)


def begin(checkpoint: Checkpoint | None, preparation: Preparation) -> Beginning:
    """Compare a run with the checkpoint that it goes on from. Raises CheckpointError, in one line with both values, if
    it would be another run."""
    sources = sources_of(preparation.training)
    if checkpoint is None:
        return Beginning(None, sources)
    saved = checkpoint.saved
    there, here = ({"kind": FIRST, **described(of.network)} for of in (saved, preparation.plan))
    for key, value in there.items():  # the kind first, whose fields the others are
        if here[key] != value:
            raise CheckpointError(
                f"{checkpoint.path} is of another model: {key} is {value} there and {here[key]} in this run; "
                "use the same model and data keys, or another run.output"
            )
    paths = saved.sampling.get("images")
    before = saved.sources or tuple(Source(Identity(str(path)), None) for path in paths or ())  # of older versions
    comparison = compare_sources(before, sources, checkpoint.path)
    changed = _changed(checkpoint, preparation, comparison)
    _check_end(checkpoint, preparation)
    best, notes = _best(saved, preparation)
    resumed = saved.resumed
    if changed or comparison.rewritten:
        resumed = (*resumed, Resumed(saved.step, changed, list(comparison.rewritten)))
    warnings = (*_warnings(checkpoint, changed, comparison), *notes)
    return Beginning(checkpoint, sources, resumed, comparison.added, warnings, saved.pretrained, best)


def sampling_fingerprint(preparation: Preparation) -> dict[str, Any]:
    """Return the facts that the order of the steps depends on: a run resumes in the middle of an epoch only with the
    same ones."""
    per_step, images = preparation.question.tiles_per_step, preparation.question.images_per_step
    windows, content = preparation.question.windows, preparation.recipe.by_content
    return {
        "seed": preparation.recipe.seed,
        "images": list(preparation.training.images),
        "tiles_per_step": per_step,
        "grids": [list(t.grid) for t in preparation.training.tilings] if per_step is not None and not windows else None,
        "images_per_step": images if images > 1 else None,
        "windows": asdict(windows) if windows else None,
        "content": list(content) if content else None,
    }


def _changed(checkpoint: Checkpoint, preparation: Preparation, sources: Comparison) -> dict[str, dict[str, Any]]:
    """Return the keys with another value than the checkpoint's, as {"from": ..., "to": ...}; raise for one that must
    not change."""
    saved, order = checkpoint.saved, sampling_fingerprint(preparation)
    there, here = {**flat(saved.record), **sources.before}, {**flat(preparation.recipe.record), **sources.now}
    same_words = {
        key for key in here if there[key] == here[key] or (there[key] != there[key] and here[key] != here[key])
    }
    # The network has been compared as a whole: a preset's keys are its own.
    same_words |= {key for key in here if key.startswith("model.") and key != "model.pretrained"}
    for key, read in (("train.loss", read_loss), ("optimizer.policy", read_policy)):
        if read(there[key]) == read(here[key]):
            same_words.add(key)
    if saved.label_map == preparation.label_map:
        same_words.add("data.classes")
    if split_recompute(*(there[key] for key in _RECOMPUTE)) == split_recompute(*(here[key] for key in _RECOMPUTE)):
        same_words.update(_RECOMPUTE)
    changed = {key: {"from": there[key], "to": here[key]} for key in here.keys() - same_words - NAMES}
    changed = {key: changed[key] for key in here if key in changed}
    for key, pair in changed.items():
        if key == "data.classes" and saved.label_map.agrees(preparation.label_map):
            continue  # other names or colours are said
        refusal = "is of another run" if key in REFUSED else None
        if key in EDGE and saved.position.step > 0:
            moves = not sources.same if EDGE[key] == "sources" else saved.sampling.get(EDGE[key]) != order[EDGE[key]]
            refusal = "stands in the middle of an epoch of other steps" if moves else None
        if refusal:
            raise CheckpointError(
                f"{checkpoint.path} {refusal}: {key} is {_short(pair['from'])} there and {_short(pair['to'])} in this "
                "run; use the same, or another run.output"
            )
    return changed


def _check_end(checkpoint: Checkpoint, preparation: Preparation) -> None:
    position, epochs = checkpoint.saved.next_position, preparation.recipe.cadence.epochs
    if position > (epochs, 0):
        done = f"{position.epoch} epochs" + (f" and {position.step} steps" if position.step else "")
        raise CheckpointError(
            f"{checkpoint.path} has done {done}, but train.epochs is {epochs}; give at least "
            f"{position.epoch + (position.step > 0)}, or another run.output"
        )
    if position.step >= preparation.sampler.steps_per_epoch:
        raise CheckpointError(
            f"{checkpoint.path} stands at step {position.step} of an epoch, but an epoch of this run has "
            f"{preparation.sampler.steps_per_epoch}; give another run.output"
        )


def _best(saved: SavedState, preparation: Preparation) -> tuple[Best | None, tuple[str, ...]]:
    """Return the best validation so far by the run's score, if its checkpoint is still there, and a note if not."""
    best, folder = saved.best, preparation.recipe.folder / CHECKPOINTS
    if best is None or best.score != preparation.recipe.cadence.judge.score:
        return None, ()
    where = f"{folder / name_of(best.step)}, of the best {best.score}"
    if not (folder / name_of(best.step)).is_dir():
        return None, (f"{where}, is not there: the best begins anew",)
    assert preparation.validation is not None, "a run with a score is validated"
    if saved.judged:
        alike = hold_the_same(saved.judged, sources_of(preparation.validation))
    else:  # of an older version the keys alone are known
        there, here = flat(saved.record), flat(preparation.recipe.record)
        alike = all(there[key] == here[key] for key in ("data.val_images", "data.val_labels"))
    return (best, ()) if alike else (None, (f"{where}, was found on other validation images: the best begins anew",))


def _warnings(checkpoint: Checkpoint, changed: Mapping[str, Any], comparison: Comparison) -> list[str]:
    warnings = [
        f"{fault.partition('; use')[0]}; going on from {checkpoint.path.name}" for fault in checkpoint.passed_over
    ]
    if changed:
        words = [f"{key} from {_short(pair['from'])} to {_short(pair['to'])}" for key, pair in changed.items()]
        warnings.append(f"changed since step {checkpoint.saved.step}: {', '.join(words)}")
    if comparison.rewritten:
        count = len(comparison.rewritten)
        more = f" and {count - 1} more files have" if count > 1 else " has"
        warnings.append(
            f"{comparison.rewritten[0]}{more} been written to since step {checkpoint.saved.step}; the normalisation "
            "stays that of before"
        )
    return warnings


def flat(record: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return every key of a configuration as JSON has it, as "group.key"."""
    return {f"{group}.{key}": value for group, keys in record.items() for key, value in keys.items()}


def _short(value: Any) -> str:
    return "null" if value is None else str(value) if isinstance(value, int | float | str) else shown(repr(value))


REFUSED = frozenset(
    f"{group}.{key}"
    for group, keys in {
        "data": (
            *("classes", "label_layer", "label_attribute", "background", "warp_images", "area", "split"),
            *("split_share", "split_gap", "split_seed", "ignore_index", "nodata", "bands", "normalize"),
        ),
        "model": (
            *("name", "levels", "convs_per_level", "kernel", "base_channels", "padding", "norm", "upsampling"),
            *("dropout", "encoder", "pretrained", "image_mean", "edge_band", "build", "arguments"),
        ),
        "optimizer": ("name",),
    }.items()
    for key in keys
)
EDGE = {
    "data.images": "sources",
    "data.labels": "sources",
    "tiling.grid": "grids",
    "train.tiles_per_step": "tiles_per_step",
    "train.images_per_step": "images_per_step",
    "train.seed": "seed",
    "train.sampling": "windows",
    "train.window": "windows",
    "train.windows_per_step": "windows",
    "train.window_halo": "windows",
    "train.skip_empty": "content",
    "train.balance_classes": "content",
}
"""Keys that may change between epochs and their names in `sampling_fingerprint`: they order the steps."""
NAMES = frozenset({"train.resume", "run.output", "run.verbosity", "run.panels"})
"""Keys that name the run, or change its words and pictures: they are not compared."""
