"""The check of output files, called by every command for all its files at once, before the first write; and outputs
that are made in a temporary folder beside their place. Standard library only.

The law: no output of a command replaces one of its inputs or another of its outputs. Files are compared by device and
inode, else by real path, including their temporary names.
"""

from __future__ import annotations

import fcntl
import io
import os
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tiledseg.errors import OutputError
from tiledseg.system.files import (
    COMPANIONS_OF_NAME,
    COMPANIONS_OF_STEM,
    delete,
    flush,
    irregular_kind,
    is_zarr,
    temporary,
    writing,
)

_NAME_BYTES = 255


@dataclass(frozen=True)
class Output:
    """A file to be written: the flag or key that names it, the path as typed, and its size in bytes, if known.

    `beside`: other names that are written or removed with it, such as temporary names and sidecars of an older file.
    """

    key: str
    path: str | Path
    beside: tuple[Path, ...] = ()
    size: int = 0

    @property
    def names(self) -> tuple[Path, ...]:
        """Every name that writing this file touches, its own first."""
        return Path(self.path), *self.beside

    def refusal(self, reason: str) -> OutputError:
        return OutputError(f"cannot write {self.key} {self.path}: {reason}")


def whole(key: str, path: str | Path, size: int = 0, sidecars: Sequence[str] = ()) -> Output:
    """Return an output that is written under its temporary name and then renamed. Its `sidecars` (suffixes) from an
    earlier run are removed."""
    target = Path(path)
    if not target.name:
        raise OutputError(f"{key} is '{path}', which names no file; give a file name")
    return Output(key, path, (temporary(target), *(target.with_name(target.name + end) for end in sidecars)), size)


def check_ending(key: str, path: str, *endings: str) -> None:
    """Raise OutputError unless `path` ends in one of `endings`: a raster's name may be typed by mistake."""
    if Path(path).suffix.lower() not in endings:
        raise OutputError(f"{key} is '{path}'; give a file name that ends in {' or '.join(endings)}")


def files_below(folder: str | Path) -> list[Path]:
    return [Path(root) / name for root, _, names in os.walk(folder) for name in names]


def check_outputs(
    outputs: Sequence[Output], inputs: Iterable[str | Path] = (), own_run: str | Path | None = None
) -> None:
    """Raise OutputError unless each of `outputs` can be written as a regular file. None may replace one of `inputs`,
    another output, or a file of a run other than `own_run` (a folder), or have the name of a raster's companion."""
    sources = {identity: Path(source) for source in inputs for identity in _identities(source)}
    taken: dict[object, Output] = {}
    for output in outputs:
        _check_place(output)
        for name in output.names:
            subject = "it" if name == Path(output.path) else f"{name}, which is written with it,"
            length, kind = len(os.fsencode(name.name)), irregular_kind(name)
            if length > _NAME_BYTES:
                raise output.refusal(f"{subject} has a name of {length} bytes; give one of {_NAME_BYTES} at most")
            if kind is not None and not (name == temporary(output.path) and _is_leftover(name)):
                raise output.refusal(f"{subject} is {kind}; give a file name")
            for source in sources.values() if kind == "a folder" else ():
                if Path(os.path.realpath(name)) in Path(os.path.realpath(source)).parents:
                    raise output.refusal(f"{subject} holds the input {source}; choose another output")
            if os.path.islink(name) and not os.path.exists(name):
                raise output.refusal(f"{subject} is a link to {os.readlink(name)}, which is not there; remove it")
            for identity in _identities(name):
                if identity in sources:
                    raise output.refusal(f"{subject} is the input {sources[identity]}; choose another output")
                other = taken.setdefault(identity, output)
                if other is not output:
                    raise OutputError(
                        f"{output.key} {output.path} and {other.key} {other.path} would be one file; give two names"
                    )
        for end in (*COMPANIONS_OF_NAME, *COMPANIONS_OF_STEM, ".rrd"):
            if Path(output.path).name.lower().endswith(end.lower()):
                raise output.refusal(
                    f"GDAL reads a file that ends in {end} with the raster beside it; choose another name"
                )
        _check_run(output, own_run)
        folder = Path(output.path).parent
        if not os.access(folder, os.W_OK | os.X_OK):  # last: root has every permission
            raise output.refusal(f"no permission in {folder}; choose another output")
    _check_room(outputs)


def _is_leftover(folder: Path) -> bool:
    """Return True for a folder that a killed job has left in place of an unfinished output."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    lock = folder / _LOCK
    return not any(folder.iterdir()) or (lock.is_file() and not lock.is_symlink() and lock.stat().st_size == 0)


def _identities(path: str | Path) -> Iterator[object]:
    """Yield the keys by which two paths to one file are recognised: its real path, and device and inode if it
    exists."""
    yield os.path.realpath(path)
    try:
        status = os.stat(path)
    except OSError:
        return
    yield status.st_dev, status.st_ino


def _check_place(output: Output) -> None:
    """Raise OutputError unless the folder exists, and the path names a file in it."""
    typed = str(output.path)
    if "\0" in typed:
        raise OutputError(f"{output.key} holds a null character, {typed!r}; give a file name")
    folder = Path(typed).parent
    if irregular_kind(folder) != "a folder":
        raise output.refusal(f"{folder} is not a folder; make it first")
    store = next(filter(is_zarr, Path(os.path.realpath(typed)).parents), None)
    if store is not None:
        raise output.refusal(f"it lies in the Zarr store {store}; choose another output")
    if typed.endswith("/") or typed.rsplit("/", 1)[-1] in (".", ".."):
        raise output.refusal("it names a folder; give a file name")


def _check_run(output: Output, own: str | Path | None) -> None:
    """Raise OutputError for a name reserved by a run other than `own`, which replaces and removes such files."""
    path = Path(os.path.realpath(output.path))
    for folder, name in zip(path.parents, path.parts[:0:-1], strict=False):
        taken = FOLDERS if folder != path.parent else FILES
        other = own is None or folder != Path(os.path.realpath(own))
        if name in taken and other and (folder / CONFIG).exists() and (folder / METRICS).exists():
            raise output.refusal(f"it is of the run {folder}; choose another")


def _check_room(outputs: Sequence[Output]) -> None:
    """Raise OutputError unless the disks have room for all files together, and each is below the limit of a file."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    needed: dict[int, int] = {}
    for output in outputs:
        folder = Path(output.path).parent
        if limit != resource.RLIM_INFINITY and output.size > limit:
            words = f"it takes {output.size} bytes, but files may have {limit} here; raise the limit (ulimit -f)"
            raise output.refusal(words)
        device, free = os.stat(folder).st_dev, shutil.disk_usage(folder).free
        needed[device] = needed.get(device, 0) + output.size
        if needed[device] > free:
            needs, has = needed[device] / 2**30, free / 2**30
            raise output.refusal(f"it needs {needs:.3g} GiB, {folder} has {has:.3g} GiB free; make room")


_LOCK = "lock"


@dataclass(frozen=True)
class Unfinished:
    """An output in a temporary folder beside its place until it is whole: a value to broadcast. `inode`: number of the
    folder's lock file, which tells the folder from another job's."""

    path: Path
    inode: int

    def file(self, name: str = "whole") -> Path:
        """Return a path in the folder: of the file that gets the output's name, or of another one."""
        return temporary(self.path) / name

    def check_ours(self) -> None:
        """Raise OutputError if another job has replaced the folder, WriteError if it is gone."""
        with writing(self.path):
            if self.file(_LOCK).stat().st_ino != self.inode:
                raise taken(self.path)

    def publish(self, endings: Iterable[str] = (), replaces: bool = True) -> None:
        """Sync the finished file, give it its name, and delete the folder.

        `endings`: of companions. An older file's are deleted, and the folder's (`whole.aux.xml`) go along. Raises
        OutputError, and changes nothing, if the folder is another job's, or if the output exists and `replaces` is
        False; WriteError if a file is gone or cannot be renamed.
        """
        self.check_ours()
        if not replaces and self.path.exists():
            raise taken(self.path)
        with writing(self.path):
            for file in (self.file(), *files_below(self.file())):
                flush(file)
            names = {self.path.with_name(self.path.name + end): self.file(f"whole{end}") for end in endings}
            for name, companion in names.items():
                name.unlink(missing_ok=True)
                if companion.exists():
                    os.replace(companion, name)
            os.replace(self.file(), self.path)
        self.discard()

    def discard(self) -> None:
        """Delete the folder, unless it is gone or another job's."""
        with suppress(OSError):
            if self.file(_LOCK).stat().st_ino == self.inode:
                _delete(temporary(self.path))


def _delete(folder: Path) -> None:
    """Delete the folder of an unfinished output, its lock last, so that what a kill leaves is known as such."""
    for file in folder.iterdir() if _is_leftover(folder) else ():
        if file.name != _LOCK:
            delete(file)
    delete(folder)


@contextmanager
def unfinished(path: str | Path) -> Iterator[Unfinished]:
    """Make the folder for an output that `check_outputs` has seen, in place of a killed job's, and lock it.

    At the block's end the folder is deleted, if it is still there. Raises OutputError if it cannot be made, or if
    another job is writing this output.
    """
    check_unclaimed(path)
    folder = temporary(path)
    try:
        _delete(folder)
        folder.mkdir()
        file = open_lock(folder / _LOCK, creates=True)
    except FileExistsError:
        raise OutputError(f"cannot write {path}: {folder} cannot be removed; remove it") from None
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another output") from None
    output = Unfinished(Path(path), os.fstat(file.fileno()).st_ino)
    try:
        lock(file, partial(taken, path))
        yield output
    finally:
        output.discard()
        file.close()
        with suppress(OSError):  # NFS keeps an open file under another name until here
            folder.rmdir()


def check_unclaimed(path: str | Path) -> None:
    """Raise OutputError if a running job, maybe of an older version, writes the output `path`. Writes nothing."""
    for file in (temporary(path) / _LOCK, temporary(path)):  # an older version locks a file of that name
        check_unlocked(file, partial(taken, path))


def taken(path: str | Path, holder: str = "") -> OutputError:
    """Return the error of a file that another job is writing."""
    return OutputError(f"cannot write {path}: another job is writing it too; give each its own output")


def open_lock(path: Path, creates: bool = False) -> io.FileIO:
    """Open a file to be locked, not through a link, and without waiting for a FIFO's writer."""
    flags = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW | (os.O_CREAT if creates else 0)
    return io.FileIO(path, "r+", opener=lambda name, own: os.open(name, own | flags, 0o666))


def lock(file: io.FileIO, refusal: Callable[[str], OutputError]) -> OSError | None:
    """Lock an open file until it is closed; return the error if it cannot be locked. Raises `refusal` of the words in
    the file if another process holds the lock."""
    holder = ""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # EACCES: held, where flock is made of locks of byte ranges
        with suppress(OSError):
            holder = os.pread(file.fileno(), 300, 0).decode(errors="replace")
        raise refusal(holder) from None
    except OSError as error:
        return error
    return None


def check_unlocked(path: Path, refusal: Callable[[str], OutputError]) -> None:
    """Raise `refusal`, as `lock` does, if a process holds the lock of a file. Writes nothing."""
    try:
        file = open_lock(path)
    except OSError:
        return
    with file:
        lock(file, refusal)


# Names in the folder of a run.
CHECKPOINTS, VALIDATION, EVENTS = FOLDERS = "checkpoints", "validation", "events"
CONFIG, METRICS, STARTED, SUMMARY = "config.yaml", "metrics.jsonl", "started.json", "summary.json"
PROGRESS, PAGE = "progress.png", "report.html"
WHOLE = CONFIG, METRICS, STARTED, SUMMARY, PROGRESS, PAGE
FILES = *WHOLE, "run.lock"
