"""The file store by itself: exact copies of any size, bounds, full disks, short copies, and everything given back."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tiledseg.errors import ConfigError, MemoryLimitError, WriteError
from tiledseg.memory.file_store import Bytes, FileStore
from tiledseg.memory.slots import PAGE

MEBI = 1 << 20
SIZES = (1, 511, PAGE - 1, PAGE, PAGE + 1, 4 * MEBI - 1, 4 * MEBI, 9 * MEBI + 777)


def drawn(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@contextmanager
def descriptors_and_threads_stay() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_the_file_has_no_name(tmp_path: Path) -> None:
    with FileStore(tmp_path, MEBI):
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shift", [0, 1, 64])
def test_copies_are_exact(tmp_path: Path, shift: int) -> None:
    with descriptors_and_threads_stay(), FileStore(tmp_path, 64 * MEBI) as store:
        arrays = [_shifted(drawn(size, size), shift) for size in SIZES]
        slots = [store.take(array.nbytes) for array in arrays]
        for slot, array in zip(slots, arrays, strict=True):
            store.write(slot, array)
        for slot, array in reversed(list(zip(slots, arrays, strict=True))):
            into = _shifted(np.zeros(slot.size, np.uint8), shift)
            store.read(slot, into).wait()
            assert np.array_equal(into, array)


def _shifted(array: Bytes, shift: int) -> Bytes:
    """Return the same bytes, `shift` bytes after the begin of their memory."""
    room = np.empty(len(array) + shift, np.uint8)[shift:]
    room[:] = array
    return room


def test_a_read_waits_for_the_write_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    slowed(monkeypatch, held)
    with FileStore(tmp_path, 16 * MEBI) as store:
        slot, array, into = store.take(MEBI), drawn(MEBI), np.zeros(MEBI, np.uint8)
        store.write(slot, array)
        reading = store.read(slot, into)
        assert not reading.done()
        held.set()
        reading.wait()
        assert np.array_equal(into, array)


def test_slots_given_back_while_written_are_not_written_by_the_former_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    slowed(monkeypatch, held)
    threading.Timer(0.05, held.set).start()
    with FileStore(tmp_path, 64 * MEBI, threads=2) as store:
        slots = [store.take(MEBI) for _ in range(4)]
        for slot in slots:
            store.write(slot, drawn(MEBI, 1))
        for slot in slots:
            store.give_back(slot)  # two writes run, two have not begun
        assert [store.take(MEBI) for _ in range(4)] == slots
        for slot in slots:
            store.write(slot, drawn(MEBI, 2))
        for slot in slots:
            into = np.zeros(MEBI, np.uint8)
            store.read(slot, into).wait()
            assert np.array_equal(into, drawn(MEBI, 2))


def test_nothing_holds_what_is_copied_or_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool's thread comes to a stopped copy late, and goes on for a while after a whole one."""
    held = threading.Event()
    slowed(monkeypatch, held)
    with FileStore(tmp_path, 64 * MEBI, threads=1) as store:
        copied, stopped = drawn(MEBI), drawn(MEBI)
        ends = [weakref.ref(copied), weakref.ref(stopped)]
        running, waiting = (store.write(store.take(MEBI), each) for each in (copied, stopped))
        waiting.stop()
        del stopped
        assert ends[1]() is None, "though its thread is at the other still"
        del copied
        assert ends[0]() is not None
        held.set()
        running.wait()
        assert ends[0]() is None


def slowed(monkeypatch: pytest.MonkeyPatch, held: threading.Event) -> None:
    """Writes wait until the event is set."""

    def write(descriptor: int, parts: list[memoryview], offset: int) -> int:
        if len(parts[0]) > PAGE:
            held.wait(100)
        return real(descriptor, parts, offset)

    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", write)


def test_short_copies_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may move fewer bytes than it was asked for."""

    def shorter(move: Callable[[int, list[memoryview], int], int]) -> Callable[[int, list[memoryview], int], int]:
        return lambda descriptor, parts, offset: move(descriptor, [parts[0][: 3 * PAGE]], offset)

    monkeypatch.setattr(os, "pwritev", shorter(os.pwritev))
    monkeypatch.setattr(os, "preadv", shorter(os.preadv))
    with FileStore(tmp_path, 16 * MEBI) as store:
        slot, into = store.take(MEBI + 5), np.zeros(MEBI + 5, np.uint8)
        store.write(slot, drawn(slot.size))
        store.read(slot, into).wait()
        assert np.array_equal(into, drawn(slot.size))


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_a_copy_that_moves_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with FileStore(tmp_path, 16 * MEBI) as store:
        monkeypatch.setattr(os, name, lambda *_: 0)
        slot = store.take(MEBI)
        writing = store.write(slot, drawn(MEBI))
        with pytest.raises(WriteError, match=r"1048576 bytes at 0 failed: .*bytes are free on its disk"):
            (writing if name == "pwritev" else store.read(slot, np.zeros(MEBI, np.uint8))).wait()


def test_the_error_of_a_write_is_that_of_its_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(tmp_path, 16 * MEBI) as store:

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwritev", full)
        slot = store.take(MEBI)
        store.write(slot, drawn(MEBI))
        with pytest.raises(WriteError, match="No space left on device"):
            store.read(slot, np.zeros(MEBI, np.uint8)).wait()


def test_the_bound_is_kept_and_said(tmp_path: Path) -> None:
    with FileStore(tmp_path, 3 * PAGE) as store:
        slot = store.take(2 * PAGE)
        with pytest.raises(MemoryLimitError, match="may have 12288 bytes, of which 8192 are taken, but 5000 more"):
            store.take(5000)
        assert store.length <= 3 * PAGE
        store.give_back(slot)
        store.take(3 * PAGE)
        assert (store.taken, store.length) == (3 * PAGE, 3 * PAGE)


def test_a_full_disk_is_known_before_anything_is_written(tmp_path: Path) -> None:
    """The limit of a file's size refuses what a full disk refuses, at the same place."""
    program = f"""
import resource
from tiledseg.errors import WriteError
from tiledseg.memory.file_store import FileStore
with FileStore({str(tmp_path)!r}, 1 << 30) as store:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    store.take(1 << 20)
    try:
        store.take(4096)
    except WriteError as error:
        print(error, store.taken, store.length)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "asking for room up to 1052672 bytes failed: File too large" in ended.stdout
    assert ended.stdout.endswith("1048576 1048576\n")


@pytest.mark.parametrize("folder", ["nowhere", "file"])
def test_a_folder_that_takes_no_file_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    with descriptors_and_threads_stay(), pytest.raises(ConfigError, match=r"the store cannot be in .*; give a folder"):
        FileStore(tmp_path / folder, MEBI)


def test_closing_ends_copies_that_have_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    slowed(monkeypatch, held)
    with descriptors_and_threads_stay():
        timer = threading.Timer(0.05, held.set)
        timer.start()
        store = FileStore(tmp_path, 64 * MEBI, threads=1)
        writes = [store.write(store.take(MEBI), drawn(MEBI)) for _ in range(4)]
        store.close()
        store.close()
        timer.join()
        assert all(write.done() for write in writes)


def test_many_threads_move_many_slots(tmp_path: Path) -> None:
    with FileStore(tmp_path, 256 * MEBI, threads=3) as store:
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            draw = random.Random(seed)
            try:
                for turn in range(25):
                    data = drawn(draw.choice((3, PAGE, 100_000, MEBI + 1)), 100 * seed + turn)
                    slot = store.take(data.nbytes)
                    store.write(slot, data)
                    if draw.random() < 0.7:
                        into = np.zeros(slot.size, np.uint8)
                        store.read(slot, into).wait()
                        assert np.array_equal(into, data)
                    store.give_back(slot)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert store.taken == 0
        assert store.length <= 6 * (MEBI + PAGE) * 2


def test_a_thousand_rounds_take_no_more_than_the_first(tmp_path: Path) -> None:
    with FileStore(tmp_path, 64 * MEBI) as store:
        data = drawn(100_001)
        lengths = set()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(1000):
            slots = [store.take(data.nbytes) for _ in range(3)]
            for slot in slots:
                store.write(slot, data)
            for slot in slots:
                store.give_back(slot)
            lengths.add(store.length)
        assert lengths == {3 * 102400}
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
