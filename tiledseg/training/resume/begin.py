"""Whether a run may go on from a checkpoint, and what it changes: each key as `rules` has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tiledseg.architecture.kinds import FIRST, described
from tiledseg.checkpoint.check import Checkpoint
from tiledseg.checkpoint.folder import name_of
from tiledseg.checkpoint.saved_state import Best, Origin, Resumed, SavedState, Source
from tiledseg.checkpoint.typed_json import quoted
from tiledseg.config.schedules import split_recompute
from tiledseg.errors import CheckpointError
from tiledseg.raster.reading.identity import Identity
from tiledseg.records import dataclass
from tiledseg.system.run_names import CHECKPOINTS
from tiledseg.training.preparing.preparation import Preparation
from tiledseg.training.resume.rules import EDGE, OTHER, REFUSED, RULES
from tiledseg.training.resume.sources import Comparison, compare_sources, hold_the_same, sources_of

_ORDER = {  # keys by what they are among the things that the order of steps depends on
    "train.seed": "seed",
    "train.tiles_per_step": "tiles_per_step",
    "train.images_per_step": "images_per_step",
    "tiling.grid": "grids",
    "train.sampling": "windows",
    "train.window": "windows",
    "train.windows_per_step": "windows",
    "train.window_halo": "windows",
    "train.skip_empty": "content",
    "train.balance_classes": "content",
}

_RECOMPUTE = "memory.recompute", "parallel.recompute"


@dataclass(frozen=True)
class Beginning:
    """What a run starts with: a checkpoint, or None; its images as they are now; where it was resumed with changes,
    this time the last; the images, by number, that the checkpoint did not know; warnings for the user; the file of
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
        """Whether the checkpoint has the weights of classes that this run asks for: the key has not changed since."""
        if self.checkpoint is None or not self.checkpoint.saved.class_weights:
            return False
        step = self.checkpoint.saved.step
        return not any(r.step == step and "train.class_weights" in r.changed for r in self.resumed)


def begin(checkpoint: Checkpoint | None, preparation: Preparation) -> Beginning:
    """Raises CheckpointError, in one line with both values, where the run would not be that of the checkpoint."""
    sources = sources_of(preparation.training)
    if checkpoint is None:
        return Beginning(None, sources)
    saved = checkpoint.saved
    _check_network(checkpoint, preparation)
    found = compare_sources(_sources_before(saved), sources, checkpoint.path)
    changed = _changed(checkpoint, preparation, found)
    _check_end(checkpoint, preparation)
    best, note = _best(saved, preparation)
    return Beginning(
        checkpoint,
        sources,
        _recorded(saved, changed, found),
        found.added,
        (*_warnings(checkpoint, changed, found), *note),
        saved.pretrained,
        best,
    )


def sampling_fingerprint(preparation: Preparation) -> dict[str, Any]:
    """What the order of the steps depends on: a run resumes in the middle of an epoch only where this is unchanged."""
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


def _sources_before(saved: SavedState) -> tuple[Source, ...]:
    paths = saved.sampling.get("images")
    if saved.sources or not isinstance(paths, list):
        return saved.sources
    return tuple(Source(Identity(str(path)), None) for path in paths)


def _check_network(checkpoint: Checkpoint, preparation: Preparation) -> None:
    there, here = ({"kind": FIRST, **described(of.network)} for of in (checkpoint.saved, preparation.plan))
    for key, value in there.items():  # the kind first, whose fields the others are
        if here[key] != value:
            raise CheckpointError(
                f"{checkpoint.path} is of another model: {key} is {value} there and {here[key]} in this run; "
                "use the same model and data keys, or another run.output"
            )


def _changed(checkpoint: Checkpoint, preparation: Preparation, sources: Comparison) -> dict[str, dict[str, Any]]:
    """The keys with another value than the checkpoint's, as {"from": ..., "to": ...}; raises for one that must not."""
    saved, order = checkpoint.saved, sampling_fingerprint(preparation)
    there, here = {**flat(saved.record), **sources.before}, {**flat(preparation.recipe.record), **sources.now}
    changed = {
        key: {"from": there[key], "to": here[key]}
        for key, rule in RULES.items()
        if rule.change != OTHER and not _same(there[key], here[key]) and not _means_the_same(key, saved, preparation)
    }
    if _recompute(there) == _recompute(here):
        changed = {key: pair for key, pair in changed.items() if key not in _RECOMPUTE}
    for key, pair in changed.items():
        change = RULES[key].change
        name = _ORDER.get(key)
        moves = saved.sampling.get(name) != order[name] if name else not sources.same
        if key == "data.classes" and saved.label_map.agrees(preparation.label_map):
            continue  # other names or colours: told
        if change == REFUSED or (change == EDGE and moves and saved.position.step > 0):
            what = "is of another run" if change == REFUSED else "stands in the middle of an epoch of other steps"
            raise CheckpointError(
                f"{checkpoint.path} {what}: {key} is {_short(pair['from'])} there and {_short(pair['to'])} in this "
                "run; use the same, or another run.output"
            )
    return changed


def _recompute(record: Mapping[str, Any]) -> Any:
    """What is computed once more, by whichever of two keys it is said."""
    return split_recompute(*(record[key] for key in _RECOMPUTE))


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal; so are two NaN."""
    return one == other or (one != one and other != other)


def _means_the_same(key: str, saved: SavedState, preparation: Preparation) -> bool:
    """Whether other words say the same. The network has been compared as a whole: a preset's keys are its own."""
    if key == "data.classes":
        return saved.label_map == preparation.label_map
    return key.startswith("model.") and key != "model.pretrained"


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
    """The best validation so far by the run's score, whose checkpoint is still there; and what is to be said."""
    best, folder = saved.best, preparation.recipe.folder / CHECKPOINTS
    if best is None or best.score != preparation.recipe.cadence.judge.score:
        return None, ()
    where = f"{folder / name_of(best.step)}, of the best {best.score}"
    if not (folder / name_of(best.step)).is_dir():
        return None, (f"{where}, is not there: the best begins anew",)
    if not _judged_alike(saved, preparation):
        return None, (f"{where}, was found on other validation images: the best begins anew",)
    return best, ()


def _judged_alike(saved: SavedState, preparation: Preparation) -> bool:
    """Whether the run is validated on what the checkpoint was; of an older one the keys alone are known."""
    assert preparation.validation is not None, "who asks for a score is validated"
    if saved.judged:
        return hold_the_same(saved.judged, sources_of(preparation.validation))
    there, here = flat(saved.record), flat(preparation.recipe.record)
    return all(there[key] == here[key] for key in ("data.val_images", "data.val_labels"))


def _recorded(saved: SavedState, changed: Mapping[str, Any], found: Comparison) -> tuple[Resumed, ...]:
    if not changed and not found.rewritten:
        return saved.resumed
    return (*saved.resumed, Resumed(saved.step, dict(changed), list(found.rewritten)))


def _warnings(checkpoint: Checkpoint, changed: Mapping[str, Any], found: Comparison) -> tuple[str, ...]:
    taken = f"going on from {checkpoint.path.name}"
    warnings = [f"{fault.partition('; use')[0]}; {taken}" for fault in checkpoint.passed_over]
    if changed:
        told = [f"{key} from {_short(pair['from'])} to {_short(pair['to'])}" for key, pair in changed.items()]
        warnings.append(f"changed since step {checkpoint.saved.step}: {', '.join(told)}")
    if found.rewritten:
        more = f" and {len(found.rewritten) - 1} more files have" if len(found.rewritten) > 1 else " has"
        warnings.append(
            f"{found.rewritten[0]}{more} been written to since step {checkpoint.saved.step}; the normalisation stays "
            "that of before"
        )
    return tuple(warnings)


def flat(record: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Every key of a configuration as JSON has it, as "group.key"."""
    return {f"{group}.{key}": value for group, keys in record.items() for key, value in keys.items()}


def _short(value: Any) -> str:
    return "null" if value is None else str(value) if isinstance(value, int | float | str) else quoted(value)
