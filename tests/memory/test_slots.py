"""Slots: none overlaps another, gaps are joined and used again, and the end is where it must be."""

from __future__ import annotations

import random

import pytest

from tiledseg.errors import MemoryLimitError
from tiledseg.memory.slots import PAGE, Slot, SlotTable


def take(table: SlotTable, size: int) -> Slot:
    slot = table.find(size)
    table.take(slot)
    return slot


def test_slots_are_whole_pages_in_the_lowest_gaps() -> None:
    """Gaps beside each other are one, and the one at the end grows."""
    table = SlotTable("a store", 1 << 30)
    slots = [take(table, size) for size in (1, PAGE, PAGE + 1, PAGE, PAGE)]
    assert [slot.offset // PAGE for slot in slots] == [0, 1, 2, 4, 5]
    assert (table.end, table.taken) == (6 * PAGE, 6 * PAGE)
    for index in (0, 2, 1, 4):
        table.give_back(slots[index])
    assert take(table, 4 * PAGE).offset == 0
    assert take(table, 3 * PAGE).offset == 5 * PAGE
    assert table.end == 8 * PAGE
    with pytest.raises(AssertionError, match="was not taken"):
        table.give_back(slots[4]), table.give_back(slots[4])


def test_drawn_takings_agree_with_a_list_of_pages() -> None:
    draw = random.Random(4)
    table, held, pages = SlotTable("a store", 40 * PAGE), list[Slot](), set[int]()
    for _ in range(3000):
        if held and draw.random() < 0.48:
            slot = held.pop(draw.randrange(len(held)))
            table.give_back(slot)
            pages -= _pages(slot)
        else:
            size = draw.randrange(1, 9 * PAGE)
            count = -(-size // PAGE)
            first = next(at for at in range(99) if not any(at + k in pages for k in range(count)))
            if first + count > 40:
                with pytest.raises(MemoryLimitError, match=f"give it at least {(first + count) * PAGE}"):
                    table.find(size)
                continue
            held.append(take(table, size))
            assert held[-1].offset == first * PAGE
            pages |= _pages(held[-1])
        assert table.taken == len(pages) * PAGE


def _pages(slot: Slot) -> set[int]:
    return set(range(slot.offset // PAGE, slot.stop // PAGE))
