"""Slots: none overlaps another, gaps are joined and used again, and the end is where it must be."""

from __future__ import annotations

import random

import pytest

from tiledseg.memory.disk.slots import PAGE, Slot, SlotTable, whole_pages


def test_slots_are_whole_pages_one_after_another() -> None:
    table = SlotTable()
    assert [table.take(size) for size in (1, PAGE, PAGE + 1)] == [
        Slot(0, 1),
        Slot(PAGE, PAGE),
        Slot(2 * PAGE, PAGE + 1),
    ]
    assert (table.end, table.taken) == (4 * PAGE, 4 * PAGE)


def test_gaps_beside_each_other_are_one() -> None:
    table = SlotTable()
    a, b, c, _ = [table.take(PAGE) for _ in range(4)]
    for slot in (a, c, b):
        table.give_back(slot)
    assert table.take(3 * PAGE).offset == 0


def test_the_gap_at_the_end_grows() -> None:
    table = SlotTable()
    table.take(PAGE)
    table.give_back(table.take(PAGE))
    assert table.stop_of(3 * PAGE) == 4 * PAGE
    assert table.take(3 * PAGE).offset == PAGE
    assert table.end == 4 * PAGE


def test_what_was_not_taken_is_not_given_back() -> None:
    table = SlotTable()
    slot = table.take(PAGE)
    table.give_back(slot)
    with pytest.raises(AssertionError, match="was not taken"):
        table.give_back(slot)


def test_drawn_takings_agree_with_a_list_of_pages() -> None:
    draw = random.Random(4)
    table, held, pages = SlotTable(), [], set[int]()
    for _ in range(3000):
        if held and draw.random() < 0.48:
            slot = held.pop(draw.randrange(len(held)))
            table.give_back(slot)
            pages -= _pages(slot)
        else:
            size = draw.randrange(1, 9 * PAGE)
            expected = table.stop_of(size)
            first = _lowest(pages, whole_pages(size) // PAGE)
            slot = table.take(size)
            held.append(slot)
            assert slot.offset == first * PAGE
            assert max(slot.stop, table.end) == expected
            pages |= _pages(slot)
        assert table.taken == len(pages) * PAGE


def _pages(slot: Slot) -> set[int]:
    return set(range(slot.offset // PAGE, slot.stop // PAGE))


def _lowest(pages: set[int], count: int) -> int:
    """The lowest page from which `count` are free, tried one after another."""
    return next(at for at in range(len(pages) + 10**6) if not any(at + k in pages for k in range(count)))
