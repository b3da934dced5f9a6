"""What is written replaces nothing that is read, and nothing else that is written; and regular files only."""

import fcntl
import os
import resource
from pathlib import Path

import pytest

from tiledseg.errors import OutputError
from tiledseg.system.outputs import Output, check_outputs, unfinished, whole


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with an image, ways to it, and what is no regular file."""
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    Path("image.tif").write_bytes(b"pixels")
    Path("link.tif").symlink_to("image.tif")
    os.link("image.tif", "hard.tif")
    Path("dangling").symlink_to("nowhere/file")
    Path("loop").symlink_to("loop")
    os.mkfifo("fifo")


@pytest.mark.parametrize("path", ["image.tif", "link.tif", "hard.tif", "sub/../image.tif", "{here}/image.tif"])
def test_an_input_under_any_of_its_paths_is_refused(path: str) -> None:
    with pytest.raises(OutputError, match=r"--output .* is the input image\.tif; choose another output"):
        check_outputs([whole("--output", path.format(here=os.getcwd()))], ["other.tif", "image.tif"])


@pytest.mark.parametrize("second", ["o.tif", "sub/../o.tif", ".o.tif.part", "o.tif.msk"])
def test_two_outputs_of_one_name_are_refused(second: str) -> None:
    first = whole("--output", "o.tif", sidecars=(".msk",))
    with pytest.raises(OutputError, match=r"--probabilities .* and --output o\.tif would be one file; give two names"):
        check_outputs([first, whole("--probabilities", second)])
    check_outputs([first, whole("--probabilities", "sub/o.tif")])


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("sub/..", "names a folder"),
        ("loop", "it is a link to loop, which is not there"),
        ("fifo/m.tif", "fifo is not a folder"),
        ("m\0.tif", "null character"),
        ("m" * 252, "258 bytes; give one of 255 at most"),
    ],
)
def test_only_regular_files_with_a_folder_are_accepted(path: str, words: str) -> None:
    with pytest.raises(OutputError, match=words):
        check_outputs([whole("--output", path)])


def test_folders_in_the_temporary_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed job's is replaced; another one stays, with what is in it, and so does a running job's of any version."""
    part, lock = Path(".o.tif.part"), Path(".o.tif.part/lock")
    part.mkdir()
    part.joinpath("notes.txt").touch()
    with pytest.raises(OutputError, match=r"\.o\.tif\.part, which is written with it, is a folder; give a file name"):
        check_outputs([whole("--output", "o.tif")])
    lock.touch()
    check_outputs([whole("--output", "o.tif")])
    with pytest.raises(OutputError, match=r"holds the input \.o\.tif\.part/notes\.txt; choose another output"):
        check_outputs([whole("--output", "o.tif")], [".o.tif.part/notes.txt"])
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another job is writing it too"), unfinished("o.tif"):
            pass
    with unfinished("o.tif") as output:
        assert os.listdir(part) == ["lock"]
        output.file().touch()
        output.publish()
    Path("sub", "lock").touch()
    part.symlink_to("sub")
    with pytest.raises(OutputError, match="is a folder"):
        check_outputs([whole("--output", "o.tif")])
    part.unlink()
    os.mkfifo(part)
    with pytest.raises(OutputError, match=r"\.o\.tif\.part, which is written with it, is a FIFO; give a file name"):
        check_outputs([whole("--output", "o.tif")])
    part.unlink()
    with part.open("w") as file:  # an older version's job
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another job is writing it too"), unfinished("o.tif"):
            pass
        assert part.is_file()
    part.unlink()
    part.mkdir()
    monkeypatch.setattr("tiledseg.system.outputs.delete", lambda _: None)
    with pytest.raises(OutputError, match=r"\.o\.tif\.part cannot be removed; remove it"), unfinished("o.tif"):
        pass


def test_a_folder_that_is_deleted_is_known_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill before any of the deletions leaves a folder that the next job replaces."""
    unlink, deleted = os.unlink, list[str]()

    def watched(path: os.PathLike[str] | str, **where: int) -> None:
        check_outputs([whole("--output", "o.tif")])
        deleted.append(os.path.basename(path))
        unlink(path, **where)

    with unfinished("o.tif") as output:
        for name in ("a", "plain", "whole", "whole.ovr", "z"):
            output.file(name).write_bytes(b"x")
        monkeypatch.setattr(os, "unlink", watched)
    assert len(deleted) == 6


def test_a_folder_without_permission_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OutputError, match="no permission in"):
        check_outputs([whole("--output", "m.tif")])


def test_the_disk_takes_all_files_together(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    part = Output("--output", "m.tif", size=free // 3 * 2)
    check_outputs([part])
    with pytest.raises(OutputError, match=r"it needs .* GiB, \. has .* GiB free; make room"):
        check_outputs([part, Output("--probabilities", "p.tif", size=free // 3 * 2)])


def test_a_limit_of_the_size_of_files_is_seen_beforehand() -> None:
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, former[1]))
    try:
        check_outputs([Output("--output", "m.tif", size=5000)])
        with pytest.raises(OutputError, match=r"it takes 5001 bytes, but files may have 5000 here; raise the limit"):
            check_outputs([Output("--output", "m.tif", size=5001)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


@pytest.mark.parametrize("end", [*(".tif.aux.xml", ".tif.OVR", ".tif.msk", ".tfw", ".TFW", ".wld", ".prj"), "_RPC.TXT"])
def test_what_gdal_reads_with_a_raster_is_no_output(end: str) -> None:
    with pytest.raises(
        OutputError, match=r"cannot write --any .*: GDAL reads a file that ends in .* choose another name"
    ):
        check_outputs([whole("--any", f"image{end}")])
    check_outputs([whole("--any", "image.tif.png", sidecars=(".aux.xml",))])
