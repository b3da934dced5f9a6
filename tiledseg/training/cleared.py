"""What it takes that freed memory goes back to the system, which clears each page before it gives it out again."""

from __future__ import annotations

import os
import resource

WORTH_SAYING = 0.1  # of the run's time


def pages_taken() -> int:
    """By this process, so far: each has been cleared."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def clearing_in_words(pages: int, seconds_a_byte: float, seconds: float) -> str | None:
    """For the user, of a run of so many seconds; None where it is little."""
    cleared = pages * os.sysconf("SC_PAGE_SIZE") * seconds_a_byte
    if cleared < WORTH_SAYING * seconds:
        return None
    return (
        f"about {cleared:.1f} of {seconds:.1f} s went into clearing memory that had been given back: it is kept, and "
        "this is saved, with a memory.budget by which nothing is computed once more and no blocks are taken"
    )
