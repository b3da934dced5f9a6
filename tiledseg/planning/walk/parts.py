"""Parts of all choices of a walk, by what becomes of a skip and of who takes it: what a search decides beforehand.

An item that is rebuilt of one from long before it, as a decoder's concatenation is of a skip, ties what is far apart:
either it is not rebuilt; or what it takes is there; or this is rebuilt for it, and lies there from then on. In each of
these parts a bound can count what it could else not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiledseg.geometry.memory_words import REBUILD, WORDS
from tiledseg.planning.walk.items import Walk

MOST_STAYING = 2  # items of a link that take work
NEAR = 3  # places between an item and one that is rebuilt of it which a bound overlooks


@dataclass(frozen=True)
class Part:
    """`words`: what may become of each item. `lying`: items that are rebuilt for others, and of each a moment up to
    which it lies there at least. `decided`: links."""

    words: tuple[tuple[str, ...], ...]
    lying: tuple[tuple[int, int], ...] = ()
    decided: int = 0

    @classmethod
    def whole(cls, walk: Walk) -> Part:
        return cls(tuple(tuple(word for word in WORDS if item.can_be(word)) for item in walk.items))

    def split(self, walk: Walk, link: Sequence[int]) -> Iterator[Part]:
        """By the first item of a link, and from it to the last, that is not rebuilt; then all are."""
        words, lying, until = list(self.words), self.lying, walk.items[link[0]].after
        for index in link:
            others = tuple(word for word in words[index] if word != REBUILD)
            if others:
                yield Part((*words[:index], others, *words[index + 1 :]), lying, self.decided + 1)
            if REBUILD not in words[index]:
                return
            words[index] = (REBUILD,)
            item = walk.items[index]
            if item.stays and index != link[0]:
                lying = (*lying, (index, until))
        yield Part(tuple(words), lying, self.decided + 1)

    def base(self, walk: Walk) -> list[int]:
        """At each moment the bytes that are there whatever is chosen of this part."""
        found = list(walk.base)
        until: dict[int, int] = {}
        for index, last in self.lying:
            until[index] = max(last, until.get(index, last))
        for index, last in until.items():
            for moment in range(walk.items[index].lies_from, last + 1):
                found[moment] += walk.items[index].bytes
        return found


def links(walk: Walk, order: Sequence[int]) -> list[tuple[int, ...]]:
    """Of each item that takes one from long before it: it, that one, and what this is rebuilt of if it does not stay,
    up to the first that does; the largest first."""
    at = {index: place for place, index in enumerate(order)}
    found = []
    for index, item in enumerate(walk.items):
        for parent in item.parents if item.asked else ():
            if at[index] - at[parent] > NEAR:
                link = _link(walk, index, parent)
                if link:
                    found.append(link)
    return sorted(found, key=lambda link: -walk.items[link[0]].bytes)


def _link(walk: Walk, index: int, parent: int) -> tuple[int, ...]:
    """Empty where nobody has to lie there if all are rebuilt."""
    moment, link, staying = walk.items[index].after, [index, parent], 0
    while not walk.items[link[-1]].is_there(moment):
        last = walk.items[link[-1]]
        staying += last.stays
        if staying == MOST_STAYING or len(last.parents) != 1:
            return tuple(link) if staying else ()
        link.append(last.parents[0])
    return tuple(link[:-1]) if staying else ()
