"""TRL's OffloadActivations as a way, where it is installed: to pinned memory beside an accelerator.

On a CPU it does not start by itself, as there is no accelerator to ask. Told that the CPU is one, it copies what is
kept from memory to memory, without streams and pinned pages: it frees nothing, and stands here for its cost alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from typing import NamedTuple
from unittest import mock

import torch

from benchmarks.large_model_support.ways import Way


class TrlWay(NamedTuple):
    """`way` is None where there is none; `note` says how it went."""

    note: str
    way: Way | None = None


def trl_way() -> TrlWay:
    try:
        version = import_module("trl").__version__
        OffloadActivations = import_module("trl.models.activation_offloading").OffloadActivations  # noqa: N806
    except ImportError as error:
        return TrlWay(f"TRL is not installed here ({error}): no row for its OffloadActivations")
    if torch.accelerator.is_available():
        return TrlWay(f"TRL {version}: OffloadActivations as it comes", OffloadActivations)
    note = f"TRL {version} on a CPU: OffloadActivations() starts as it comes"
    try:
        OffloadActivations()
    except AttributeError as error:
        note = (
            f"TRL {version} on a CPU: OffloadActivations() ends with {type(error).__name__} ({error}); told that "
            "the CPU is the accelerator, without streams and pinned pages, it copies from memory to memory"
        )

    def told() -> AbstractContextManager[object]:
        with mock.patch("torch.accelerator.current_accelerator", return_value=torch.device("cpu")):
            made: AbstractContextManager[object] = OffloadActivations(use_pin_memory=False, use_streams=False)
            return made

    return TrlWay(note, told)
