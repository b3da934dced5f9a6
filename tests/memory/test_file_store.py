"""The file store by itself: exact copies of any size, bounds, full disks, short copies, and everything given back."""

from __future__ import annotations

import os
import random
import threading
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from tiledseg.errors import ConfigError, MemoryLimitError, WriteError
from tiledseg.memory.file_store import FileStore
from tiledseg.memory.mover import PAGE, Copy, Mover, Slot

MEBI = 1 << 20
pytestmark = pytest.mark.usefixtures("everything_is_given_back")
SIZES = (1, 511, PAGE - 1, PAGE, PAGE + 1, 4 * MEBI - 1, 9 * MEBI + 777)


def drawn(size: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, np.uint8))


def equal(store: FileStore, sent: Copy, data_P: torch.Tensor) -> bool:
    flat_P, copying = store.bring(sent)
    copying.wait()
    return torch.equal(flat_P, data_P)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes wait until the event is set."""
    let_go, real = threading.Event(), os.pwritev

    def pwritev(descriptor: int, parts: list[memoryview], offset: int) -> int:
        let_go.wait(100)
        return real(descriptor, parts, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    return let_go


@pytest.mark.parametrize("shift", [0, 1])
def test_copies_are_exact(tmp_path: Path, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file without a name, from any place of memory; also where the system moves fewer bytes than it was asked."""
    for name in ("pwritev", "preadv"):
        real = getattr(os, name)

        def shorter(descriptor: int, parts: list[memoryview], offset: int, real: Callable[..., int] = real) -> int:
            return real(descriptor, [parts[0][: MEBI + 5]], offset)

        monkeypatch.setattr(os, name, shorter)
    with closing(FileStore(tmp_path, 64 * MEBI)) as store:
        assert list(tmp_path.iterdir()) == []
        tensors = [drawn(size + shift, size)[shift:] for size in SIZES]
        sent = [store.send(data_P) for data_P in tensors]
        for one, data_P in reversed(list(zip(sent, tensors, strict=True))):
            assert equal(store, one, data_P)


def test_a_read_waits_for_the_write_before_it(tmp_path: Path, held: threading.Event) -> None:
    with closing(FileStore(tmp_path, 16 * MEBI)) as store:
        data_P = drawn(MEBI)
        flat_P, reading = store.bring(store.send(data_P))
        assert not reading.done()
        held.set()
        reading.wait()
        assert torch.equal(flat_P, data_P)


def test_slots_given_back_while_written_are_not_written_by_the_former_owner(
    tmp_path: Path, held: threading.Event
) -> None:
    threading.Timer(0.05, held.set).start()
    with closing(FileStore(tmp_path, 64 * MEBI)) as store:
        first = [store.send(drawn(MEBI, 1)) for _ in range(4)]
        for sent in first:
            store.drop(sent)  # two writes run, two have not begun
        second = [store.send(drawn(MEBI, 2)) for _ in range(4)]
        assert [sent.slot for sent in second] == [sent.slot for sent in first]
        assert all(equal(store, sent, drawn(MEBI, 2)) for sent in second)


def test_nothing_holds_what_is_copied_or_stopped(tmp_path: Path, held: threading.Event) -> None:
    """A pool's thread comes to a stopped copy late, and goes on after a whole one. Closing ends the rest."""
    with closing(FileStore(tmp_path, 64 * MEBI)) as store:
        copied, stopped = drawn(MEBI), drawn(MEBI)
        ends = [weakref.ref(copied.untyped_storage()), weakref.ref(stopped.untyped_storage())]
        running, waiting = (store.send(each) for each in (copied, stopped))
        waiting.stop()
        del stopped
        assert ends[1]() is None, "though its thread is at the other still"
        del copied
        held.set()
        running.wait()
        assert ends[0]() is None
        held.clear()
        later = threading.Timer(0.05, held.set)
        later.start()
        writes = [store.send(drawn(MEBI)) for _ in range(4)]
    store.close()
    later.join()
    assert all(write.done() for write in writes)


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
@pytest.mark.parametrize("moved", [0, None])
def test_a_copy_that_fails_is_an_error_of_its_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, moved: int | None
) -> None:
    """A write's is that of its read, too."""

    def fail(*_: object) -> int:
        if moved is None:
            raise OSError(28, "No space left on device")
        return moved

    fail.__name__ = name
    with closing(FileStore(tmp_path, 16 * MEBI)) as store:
        monkeypatch.setattr(os, name, fail)
        sent = store.send(drawn(MEBI))
        words = "No space left on device" if moved is None else "Input/output error"
        with pytest.raises(WriteError, match=rf"{name} of 1048576 bytes at 0 failed: {words}; \d+ bytes are free on"):
            store.bring(sent)[1].wait()
        if name == "pwritev":
            with pytest.raises(WriteError, match=words):
                sent.wait()


@pytest.mark.parametrize("folder", ["nowhere", "file"])
def test_a_folder_that_takes_no_file_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the store cannot be in .*; give a folder"):
        FileStore(tmp_path / folder, MEBI)


def test_drawn_slots_agree_with_a_list_of_pages() -> None:
    """The lowest place that holds one; gaps beside each other are one. The error of one beyond the limit says so."""

    draw = random.Random(4)
    store, held, pages = Mover("a store", 40 * PAGE), list[Slot](), set[int]()
    for _ in range(3000):
        if held and draw.random() < 0.48:
            slot = held.pop(draw.randrange(len(held)))
            store.drop(Copy(slot))
            pages -= _pages(slot)
        else:
            size = draw.randrange(1, 9 * PAGE)
            count = -(-size // PAGE)
            first = next(at for at in range(99) if not any(at + k in pages for k in range(count)))
            if first + count > 40:
                words = rf"a store may have 163840 bytes, of which {len(pages) * PAGE} are taken, but {size} more are"
                with pytest.raises(MemoryLimitError, match=rf"{words} .*give it at least {(first + count) * PAGE}, or"):
                    store.take(size)
                continue
            held.append(store.take(size))
            assert held[-1].offset == first * PAGE
            pages |= _pages(held[-1])


def test_a_copy_that_cannot_begin_gives_its_slot_back() -> None:
    class Unpinned(Mover):
        def _start(self, slot: Slot, flat_P: torch.Tensor, sent: Copy | None) -> Copy:
            raise MemoryLimitError("nothing can be pinned")

    store = Unpinned("a store", PAGE)
    for _ in range(2):
        with pytest.raises(MemoryLimitError, match="nothing can be pinned"):
            store.send(torch.zeros(PAGE, dtype=torch.uint8))


def _pages(slot: Slot) -> set[int]:
    return set(range(slot.offset // PAGE, slot.stop // PAGE))
