"""One storage that autograd keeps, and where its bytes are."""

from __future__ import annotations

import enum
import weakref
from dataclasses import field

import torch

from tiledseg.memory.mover import Brought, Sent
from tiledseg.memory.owners import StorageKey, held_by
from tiledseg.memory.saved import Saved
from tiledseg.memory.timeline import Record
from tiledseg.records import dataclass


class State(enum.Enum):
    RESIDENT = "in memory"
    LEAVING = "in memory, and being copied out"
    AWAY = "outside"
    RETURNING = "outside, and in memory as soon as its copy has ended"
    FREE = "nobody wants it any more"


@dataclass(eq=False)
class Entry:
    """`key` tells the storage while it is in memory (RESIDENT, LEAVING), `number` forever.

    `alone`: nobody but autograd holds it, so that nobody can change it any more. `ordinal`: its number in `record`, the
    step that saved it. `live`: saved views of it. `used`: uses since it came back, or ever; `wanted`: views
    saved when it came back, each of which will use it. Only what is `alone` leaves: its copy outside is final.
    """

    number: int
    key: StorageKey
    size: int
    record: Record
    ordinal: int
    state: State = State.RESIDENT
    alone: bool = False
    live: int = 0
    used: int = 0
    wanted: int = 0
    sent: Sent | None = None
    flat_P: torch.Tensor | None = None  # all its bytes, while they are copied out
    brought: Brought | None = None
    _saved: list[weakref.ref[Saved]] = field(default_factory=list)
    _watched: list[torch.Tensor] = field(default_factory=list)

    @property
    def outward(self) -> Sent:
        assert self.sent is not None, "its bytes have been sent"
        return self.sent

    @property
    def inward(self) -> Brought:
        assert self.brought is not None, "its bytes are on their way back, or there"
        return self.brought

    def add(self, saved: Saved) -> None:
        self.live += 1
        self._saved.append(weakref.ref(saved))

    def saved(self) -> list[Saved]:
        return [saved for reference in self._saved if (saved := reference()) is not None]

    def find_alone(self) -> bool:
        """Whether autograd alone holds it now."""
        aliases = [saved.alias for saved in self.saved() if saved.alias is not None]
        self.alone = bool(aliases) and held_by(aliases[0], len(aliases))
        return self.alone

    def whole(self) -> torch.Tensor:
        """All bytes of the storage, which is in memory, as one tensor."""
        alias = next(saved.alias for saved in self.saved() if saved.alias is not None)
        flat_P = torch.empty(0, dtype=torch.uint8, device=alias.device)
        return flat_P.set_(alias.untyped_storage())

    def watch(self, flat_P: torch.Tensor) -> None:
        """Learn of writes to `flat_P`, and to views of it, without holding its bytes."""
        self._watched = [tensor for tensor in self._watched if tensor._version]
        watching = flat_P.detach()
        watching.data = torch.empty(0, dtype=torch.uint8)  # the version stays that of `flat_P`
        self._watched.append(watching)

    def version(self) -> int:
        """How often a backward pass has written over what it was given."""
        return sum(tensor._version for tensor in self._watched)
