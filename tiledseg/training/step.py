"""One optimizer step over the tiles of all ranks: sums of losses and weights, one all-reduce, one update."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tiledseg.comm.mesh import Mesh
from tiledseg.comm.point_to_point import Traffic
from tiledseg.errors import TiledsegError
from tiledseg.gradients import GradientReducer, clip_gradients, scale_gradients
from tiledseg.models.dropout import DropoutKey, set_dropout_key
from tiledseg.raster.dataset import Sample
from tiledseg.training.halo_modes import HaloMode, Part, Piece
from tiledseg.training.memory import peak_memory
from tiledseg.training.objective import cross_entropy_sums

_SHARED = 7  # sums over all ranks, before one value of each rank


@dataclass(frozen=True)
class StepResult:
    """What a step gave, the same on every rank.

    `loss`: mean over the valid core pixels of all tiles (None where there was none); `pixels`: their number;
    `data_seconds`, `communication_seconds`: waited, mean over ranks; `halo_bytes`, `halo_messages`: sent by all ranks
    together; `memory_bytes`: the largest peak of a rank; `stop`: some rank was asked to stop.
    """

    loss: float | None
    pixels: int
    seconds: float
    data_seconds: float
    communication_seconds: float
    halo_bytes: int
    halo_messages: int
    memory_bytes: int
    stop: bool


class Stepper:
    """Runs optimizer steps. The law: what a step does depends on its tiles, not on which rank has which."""

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        mode: HaloMode,
        traffic: Traffic,
        ignore_index: int,
        seed: int,
        clip_norm: float,
        wide_sums: bool = True,
    ) -> None:
        self._network = network
        self._optimizer = optimizer
        self._mesh = mesh
        self._mode = mode
        self._traffic = traffic
        self._ignore_index = ignore_index
        self._seed = seed
        self._clip_norm = clip_norm
        self._reducer = GradientReducer(network.parameters(), mesh.communicator, wide_sums)

    def run(self, step: int, samples: Iterator[Sample], parts: Sequence[Part], stop: bool) -> StepResult:
        """Step number `step` (from 0) with this rank's next samples, which were loaded for `parts`. Collective: every
        rank calls it, also without a part. `stop` is this rank's wish to end; all ranks learn of it. The learning rate
        is the optimizer's.

        Raises TiledsegError, on every rank, where the loss is no number.
        """
        begun = time.perf_counter()
        self._reducer.zero()
        self._traffic.reset()
        sums = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        waited = 0.0
        left = sum(self._mode.pieces(part) for part in parts)
        for _ in parts:
            asked = time.perf_counter()
            sample = next(samples)
            waited += time.perf_counter() - asked
            set_dropout_key(self._network, DropoutKey(self._seed, step, sample.image))
            for piece in self._mode.forward(sample):
                if left == 1:
                    self._reducer.overlap()
                sums += self._backward(piece, sample)
                left -= 1
        asked = time.perf_counter()
        self._reducer.finish()
        communicated = self._traffic.seconds + time.perf_counter() - asked
        totals = self._sum_over_ranks(sums, stop, waited, communicated)
        loss_sum, pixels = totals[0], int(totals[1])
        if pixels:
            self._update(step, loss_sum / pixels, 1 / pixels)
        return StepResult(
            loss=loss_sum / pixels if pixels else None,
            pixels=pixels,
            seconds=time.perf_counter() - begun,
            data_seconds=totals[3] / self._mesh.size,
            communication_seconds=totals[4] / self._mesh.size,
            halo_bytes=int(totals[5]),
            halo_messages=int(totals[6]),
            memory_bytes=int(max(totals[_SHARED:])),
            stop=totals[2] > 0,
        )

    def close(self) -> None:
        """Let go of the network: another stepper may then take it."""
        self._reducer.close()

    def _backward(self, piece: Piece, sample: Sample) -> torch.Tensor:
        """Adds one piece's gradient; returns its (loss sum, weight sum)."""
        assert sample.y_HW is not None, "a tile without labels cannot be trained on"
        y_HW = sample.y_HW[piece.in_part.slices]
        target_BHW = torch.from_numpy(y_HW)[None].to(self._mesh.device, non_blocking=True)
        core_BKHW = piece.logits_BKHW
        loss, weight = cross_entropy_sums(core_BKHW.to(logits_dtype(core_BKHW)), target_BHW, self._ignore_index)
        loss.backward()
        return torch.stack([loss.detach(), weight])

    def _sum_over_ranks(self, sums: torch.Tensor, stop: bool, waited: float, communicated: float) -> list[float]:
        """[loss, weight, stops, seconds waited, seconds communicated, halo bytes, halo messages, each rank's memory]"""
        totals = torch.zeros(_SHARED + self._mesh.size, dtype=torch.float64)
        totals[:2] = sums.cpu()
        own = [float(stop), waited, communicated, float(self._traffic.bytes), float(self._traffic.messages)]
        totals[2:_SHARED] = torch.tensor(own, dtype=torch.float64)
        totals[_SHARED + self._mesh.rank] = float(peak_memory(self._mesh.device))
        totals = totals.to(self._mesh.device)
        self._mesh.communicator.all_reduce_sum(totals).wait()
        return totals.tolist()

    def _update(self, step: int, loss: float, factor: float) -> None:
        if loss != loss or loss in (float("inf"), float("-inf")):
            raise TiledsegError(
                f"the loss is {loss} at step {step + 1}; lower optimizer.lr or check the images for odd values"
            )
        scale_gradients(self._reducer, factor)
        if self._clip_norm:
            clip_gradients(self._reducer, self._clip_norm)
        self._reducer.deliver()
        self._optimizer.step()


def logits_dtype(logits: torch.Tensor) -> torch.dtype:
    """The loss is taken in float32 at least."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
