"""Communication that has been started: what a rank waits for."""

from __future__ import annotations

from typing import Protocol


class Work(Protocol):
    """A sum, or an exchange of messages, under way."""

    def wait(self) -> None:
        """Returns once the tensors hold the result. Raises CommunicationError where a peer was lost."""


class DoneWork:
    """What needed nothing to be done."""

    def wait(self) -> None:
        """Returns at once."""
