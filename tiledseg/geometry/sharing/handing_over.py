"""Who hands which pixels to whom where ranks have cut one image in two ways: by boxes that they have made, and by
boxes that they own.

Laws, for any two cuts that cover the image once each: what one rank hands to another is what that one takes from it,
and what a rank takes, with what it has itself, covers its own box once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tiledseg.geometry.box import Box


class Handed(NamedTuple):
    """The pixels of `box` go to, or come from, rank `peer`."""

    peer: int
    box: Box


class HandingOver(NamedTuple):
    """One rank's side: what it gives to others, takes from others, and has itself of its own box (None: nothing)."""

    gives: tuple[Handed, ...]
    takes: tuple[Handed, ...]
    keeps: Box | None


def hand_over(made: Mapping[int, Box], owned: Mapping[int, Box], rank: int) -> HandingOver:
    """Rank `rank`'s side, by what each rank has made and owns; peers in the order of ranks."""
    others = [peer for peer in sorted(made) if peer != rank]
    gives = tuple(Handed(peer, box) for peer in others if (box := made[rank].clip(owned[peer])).area)
    takes = tuple(Handed(peer, box) for peer in others if (box := made[peer].clip(owned[rank])).area)
    own = made[rank].clip(owned[rank])
    return HandingOver(gives, takes, own if own.area else None)
