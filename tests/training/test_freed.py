"""What is said of memory that the system has cleared again and again."""

from __future__ import annotations

import mmap

from tiledseg.training.offloading import clearing_in_words, pages_taken


def test_pages_that_are_taken_anew_are_counted() -> None:
    size = 8 << 20
    before = pages_taken()
    with mmap.mmap(-1, size) as block:
        block[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)
    assert pages_taken() - before >= size // mmap.PAGESIZE


def test_little_is_not_worth_a_line() -> None:
    pages = 10**9 // mmap.PAGESIZE
    assert clearing_in_words(pages, 1e-9, 100.0) is None
    words = clearing_in_words(pages, 1e-9, 4.0)
    assert words is not None
    assert words.startswith("about 1.0 of 4.0 s went into clearing memory")
