"""The one guard of files that are written: asked by every command, for all its files at once, before the first write.

The law: nothing that a command reads, and nothing that it writes under another name, is replaced by what it writes.
Files are compared as they lie on the disk (device and inode, else real paths), together with the names that a file has
until it is whole. Standard library only.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tiledseg.errors import OutputError
from tiledseg.system.files import COMPANIONS_OF_NAME, COMPANIONS_OF_STEM, irregular_kind, is_zarr, temporary

_NAME_BYTES = 255


@dataclass(frozen=True)
class Output:
    """A file to be written: the flag or key that named it, the path as typed, and its bytes where they are known.

    `beside` are the other names that are written or removed with it: temporary names, files that describe an older one.
    """

    key: str
    path: str | Path
    beside: tuple[Path, ...] = field(default=())
    size: int = 0

    @property
    def names(self) -> tuple[Path, ...]:
        """Every name that writing this file touches, its own first."""
        return Path(self.path), *self.beside


def whole(key: str, path: str | Path, size: int = 0, sidecars: Sequence[str] = ()) -> Output:
    """Return a file that is written under its temporary name and then renamed. Files beside an older one, with these
    `sidecars` as suffixes, are removed."""
    target = Path(path)
    if not target.name:
        return Output(key, path)
    return Output(key, path, (temporary(target), *(target.with_name(target.name + end) for end in sidecars)), size)


def check_ending(key: str, path: str, *endings: str) -> None:
    """Raise OutputError for a name that is not of what is written there: a raster's, typed in its place, say."""
    if Path(path).suffix.lower() not in endings:
        raise OutputError(f"{key} is '{path}'; give a file name that ends in {' or '.join(endings)}")


def files_below(folder: str | Path) -> list[Path]:
    return [Path(root) / name for root, _, names in os.walk(folder) for name in names]


def check_outputs(
    outputs: Sequence[Output], inputs: Iterable[str | Path] = (), own_run: str | Path | None = None
) -> None:
    """Raise OutputError unless each of `outputs` can be written, as a regular file. None may replace one of `inputs`,
    another output, or a file of a run other than that in the folder `own_run`, or become a raster's companion."""
    sources = {identity: Path(source) for source in inputs for identity in _identities(source)}
    taken: dict[object, Output] = {}
    for output in outputs:
        _check_place(output)
        for name in output.names:
            length, kind = len(os.fsencode(name.name)), irregular_kind(name)
            if length > _NAME_BYTES:
                words = f"has a name of {length} bytes; give one of {_NAME_BYTES} at most"
                raise OutputError(f"{_subject(output, name)} {words}")
            if kind is not None:
                raise OutputError(f"{_subject(output, name)} is {kind}; give a file name")
            if os.path.islink(name) and not os.path.exists(name):
                words = f"is a link to {os.readlink(name)}, which is not there; remove it"
                raise OutputError(f"{_subject(output, name)} {words}")
            for identity in _identities(name):
                if identity in sources:
                    raise OutputError(
                        f"{_subject(output, name)} is the input {sources[identity]}; choose another output"
                    )
                other = taken.setdefault(identity, output)
                if other is not output:
                    raise OutputError(
                        f"{output.key} {output.path} and {other.key} {other.path} would be one file; give two names"
                    )
        for end in (*COMPANIONS_OF_NAME, *COMPANIONS_OF_STEM, ".rrd"):
            if Path(output.path).name.lower().endswith(end.lower()):
                raise OutputError(
                    f"cannot write {output.key} {output.path}: GDAL reads a file that ends in {end} with the raster "
                    "beside it; choose another name"
                )
        _check_run(output, own_run)
        folder = Path(output.path).parent  # last, after all that is wrong for everybody: root has every permission
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OutputError(
                f"cannot write {output.key} {output.path}: no permission in {folder}; choose another output"
            )
    _check_room(outputs)


def _identities(path: str | Path) -> Iterator[object]:
    """Yield what two paths to one file have in common: the real path, and device and inode where the file is there."""
    yield os.path.realpath(path)
    try:
        status = os.stat(path)
    except OSError:
        return
    yield status.st_dev, status.st_ino


def _subject(output: Output, name: Path) -> str:
    """Return the beginning of a refusal for one of the names of an output."""
    if name == Path(output.path):
        return f"cannot write {output.key} {output.path}: it"
    return f"cannot write {output.key} {output.path}: {name}, which is written with it,"


def _check_place(output: Output) -> None:
    """Raise OutputError unless the folder is there, and the path is that of a file."""
    typed = str(output.path)
    if not typed:
        raise OutputError(f"{output.key} is empty; give a file name")
    if "\0" in typed:
        raise OutputError(f"{output.key} holds a null character, {typed!r}; give a file name")
    folder = Path(typed).parent
    if irregular_kind(folder) != "a folder":
        raise OutputError(f"cannot write {output.key} {typed}: {folder} is not a folder; make it first")
    store = next(filter(is_zarr, Path(os.path.realpath(typed)).parents), None)
    if store is not None:
        raise OutputError(
            f"cannot write {output.key} {typed}: it lies in the Zarr store {store}; choose another output"
        )
    if typed.endswith("/") or typed.rsplit("/", 1)[-1] in (".", ".."):
        raise OutputError(f"cannot write {output.key} {typed}: it names a folder; give a file name")


def _check_run(output: Output, own: str | Path | None) -> None:
    """Raise OutputError for a name that another run keeps for itself: it replaces and removes such files."""
    path = Path(os.path.realpath(output.path))
    for folder, name in zip(path.parents, path.parts[:0:-1], strict=False):
        taken = FOLDERS if folder != path.parent else FILES
        other = own is None or folder != Path(os.path.realpath(own))
        if name in taken and other and (folder / CONFIG).exists() and (folder / METRICS).exists():
            raise OutputError(f"cannot write {output.key} {output.path}: it is of the run {folder}; choose another")


def _check_room(outputs: Sequence[Output]) -> None:
    """Raise OutputError unless the disks take all files together, and the limit of a file's size each of them."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    needed: dict[int, int] = {}
    for output in outputs:
        folder = Path(output.path).parent
        if limit != resource.RLIM_INFINITY and output.size > limit:
            raise OutputError(
                f"cannot write {output.key} {output.path}: it takes {output.size} bytes, but files may have {limit} "
                "here; raise the limit (ulimit -f)"
            )
        device = os.stat(folder).st_dev
        needed[device] = needed.get(device, 0) + output.size
        free = shutil.disk_usage(folder).free
        if needed[device] > free:
            raise OutputError(
                f"cannot write {output.key} {output.path}: it needs {needed[device] / 2**30:.3g} GiB, {folder} has "
                f"{free / 2**30:.3g} GiB free; make room"
            )


CHECKPOINTS, VALIDATION, EVENTS = "checkpoints", "validation", "events"
"""Folders."""
CONFIG, METRICS, STARTED = "config.yaml", "metrics.jsonl", "started.json"
SUMMARY, PROGRESS, PAGE = "summary.json", "progress.png", "report.html"
"""Files."""
FOLDERS = CHECKPOINTS, VALIDATION, EVENTS
FILES = CONFIG, METRICS, STARTED, SUMMARY, PROGRESS, PAGE, "run.lock"
