"""From the network's scores of a piece of a map to arrays on the host.

A GPU makes them, and sends them into pinned memory; the host takes them when the next piece has been asked for, so that
the GPU computes while the host writes. On a CPU there is nothing to wait for, and a piece is taken at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tiledseg.geometry.box import Box
from tiledseg.inference.views.reflections import shares_of
from tiledseg.models.sending import asked_back

Scores = tuple[Box, torch.Tensor, NDArray[np.bool_]]


class Fetched(NamedTuple):
    """A piece of a map: its place, the class of each pixel, each class's probability where they are wanted, which
    pixels have data, and which have scores that are finite numbers."""

    core: Box
    classes_HW: NDArray[np.uint8]
    shares_KHW: NDArray[np.float32] | None
    valid_HW: NDArray[np.bool_]
    finite_HW: NDArray[np.bool_]


class _OnTheWay(NamedTuple):
    core: Box
    classes_HW: torch.Tensor
    shares_KHW: torch.Tensor | None
    valid_HW: NDArray[np.bool_]
    finite_HW: torch.Tensor
    sent: Any  # the event after which the two are there; None on a CPU

    def taken(self) -> Fetched:
        if self.sent is not None:
            self.sent.synchronize()
        shares_KHW = None if self.shares_KHW is None else self.shares_KHW.numpy()
        return Fetched(self.core, self.classes_HW.numpy(), shares_KHW, self.valid_HW, self.finite_HW.numpy())


def fetched(found: Iterable[Scores], probabilities: bool, are_shares: bool, device: torch.device) -> Iterator[Fetched]:
    """Each piece of `found`, in order, with its `probabilities` where they are wanted; `are_shares`: its scores are
    these already."""
    return one_behind(_asked(found, probabilities, are_shares), int(device.type == "cuda"))


def one_behind(asked: Iterable[_OnTheWay], behind: int) -> Iterator[Fetched]:
    """What has been asked for, taken when so many more have been."""
    waiting: list[_OnTheWay] = []
    for one in asked:
        waiting.append(one)
        if len(waiting) > behind:
            yield waiting.pop(0).taken()
    yield from (one.taken() for one in waiting)


def _asked(found: Iterable[Scores], probabilities: bool, are_shares: bool) -> Iterator[_OnTheWay]:
    for core, scores_KHW, valid_HW in found:
        classes_HW = asked_back(scores_KHW.argmax(0).to(torch.uint8))
        shares_KHW = None
        if probabilities:
            shares_KHW = asked_back((scores_KHW if are_shares else shares_of(scores_KHW)).float())
        finite_HW = asked_back(scores_KHW.amax(0).isfinite())  # the largest is not a number where any is none
        yield _OnTheWay(core, classes_HW, shares_KHW, valid_HW, finite_HW, _event(scores_KHW.device))
        del scores_KHW  # the GPU needs its memory for the next


def _event(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event
