"""Recorded runs of a module on images of any size, with values or without; `Recorded.check` compares later runs with
those of the trace."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from tiledseg.errors import ConfigError, first_line
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.layers.pixelwise import Layout
from tiledseg.geometry.shapes import is_legal_size, total_stride
from tiledseg.memory.allocations import is_exhausted
from tiledseg.models.network import GraphNetwork
from tiledseg.tracing.calls import Made, Record, differing
from tiledseg.tracing.positions import breaks_rule
from tiledseg.tracing.record import PairsError, record
from tiledseg.tracing.state import in_mode

Size = tuple[int, int]
Images = tuple[int, tuple[int, ...]]  # their number, and rows and columns
Pair = tuple[Record, Record]
FEW = 1 << 18  # most pixels of a run with values, where a module does not run without
# Batches and least sizes of further runs, far above and below those of the trace, to find branches on a size.
FAR = ((8, (70_000, 1_100)), (4, (2_100, 70_000)), (1, (4_096, 4_096)), (5, (24, 8)))


class OtherSizeError(ConfigError):
    """A refusal of a run at one size of image; another size may run."""


@dataclass
class ModuleRuns:
    """The module that is traced, and its runs on images of `bands` bands."""

    module: nn.Module
    bands: int
    pairs: dict[tuple[Any, ...], Pair] = field(default_factory=dict)  # by what they depend on

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies begin with: the module without recorded runs, which hold tensors of the original."""
        return {**vars(self), "pairs": {}}

    def probe(self, batch: int, size: Size, fakes: FakeTensorMode | None = None) -> torch.Tensor:
        """Return images of noise, in the dtype and on the device of the weights; without values if `fakes` is given."""
        weight = next((p for p in self.module.parameters() if p.is_floating_point()), torch.zeros(()))
        with fakes or nullcontext():
            draw = None if fakes else torch.Generator().manual_seed(0)
            return torch.randn(batch, self.bands, *size, generator=draw).to(weight.device, weight.dtype)

    def run(self, batch: int, size: Size, training: bool = False, fake: bool = False, **how: Any) -> Record:
        """Record a run. Raise OtherSizeError if the module does not run. `fake`: without values; `how`: of `record`."""
        fakes = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
        quiet = logging.getLogger(FakeTensorMode.__module__)  # it prints pages about a failed trial
        quiet.disabled, before = True, quiet.disabled
        try:
            x_BCHW, alone = self.probe(batch, size, fakes), _disable_current_modes() if fake else nullcontext()
            with alone, in_mode(self.module, training), torch.autocast(x_BCHW.device.type, enabled=False):
                return record(self.module, x_BCHW, fakes, **how)
        except PairsError:
            raise
        except Exception as error:  # whatever the module raises
            what = f"the module does not run on {self.bands} bands of {size[0]} x {size[1]} pixels"
            if is_exhausted(error):
                raise ConfigError(f"{what}: memory has run out; trace it where there is more") from error
            said = first_line(error) if str(error) else "in one of its checks"
            raise OtherSizeError(f"{what}: {type(error).__name__}: {said}") from error
        finally:
            quiet.disabled = before

    def pair(self, sizes: tuple[Size, Size], training: bool = False, fake: bool = False, **how: Any) -> Pair:
        """Record runs of 2 and 3 images."""
        return self.run(2, sizes[0], training, fake, **how), self.run(3, sizes[1], training, fake, **how)

    def in_other_dtype(self) -> ModuleRuns:
        """Return the runs of a copy of the module, in float64, or in float32 if it is in float64."""
        kind = torch.float32 if self.probe(1, (1, 1)).dtype == torch.float64 else torch.float64
        return ModuleRuns(copy.deepcopy(self.module).to(kind), self.bands)

    def elsewhere(self, graph: Graph, size: Size) -> Record:
        """Record a run of one image, a stride larger than `size` if the module takes it."""
        try:
            return self.run(1, legal_size(graph, size, (size[0] + 1, size[1] + 1)))
        except OtherSizeError:  # the module needs multiples of more than its graph's stride
            return self.run(1, size)


def legal_size(graph: Graph, size: Size, least: Size) -> Size:
    """Return the first legal size from `least` on, whole strides away from `size`; a side of `size` where none is."""
    stride = total_stride(graph)
    tried = (range(n + (side - n) % stride, n + 64 * stride, stride) for side, n in zip(size, least, strict=True))
    rows, cols = (next((n for n in each if is_legal_size(graph, n)), 0) for each in tried)
    return rows or size[0], cols or size[1]


def unsteady(different: str) -> ConfigError:
    """Return the refusal of a module whose calls differ at another size."""
    what = f"the module does not call the same at every size: {different}"
    return ConfigError(f"{what}; leave out branches and numbers that depend on the size")


@dataclass(frozen=True)
class Recorded:
    """The record of a trace, which stays with its graph for later comparisons."""

    source: ModuleRuns
    wanted: Sequence[int] | None  # which tensors that the module returns are the graph's outputs; None: all
    calls: tuple[str, ...]  # all calls, in words
    made: dict[Made, tuple[int, Layout]]  # of a call's result: the number of its node, and its layout
    sizes: tuple[Size, Size]  # of the images of both runs
    placed: list[Any]  # of `positions.Placed`
    known: set[tuple[Any, ...]] = field(default_factory=set)  # images at which calls were compared, with the mode
    is_wide: bool = False  # of a copy in float64: the module's casts to float32 are left out

    @property
    def module(self) -> nn.Module:
        return self.source.module

    def check(self, network: GraphNetwork, images: Iterable[Images], seconds: float = inf) -> int:
        """Compare the module's calls for images of these batches and sizes, in the network's mode, with those of its
        trace. Return how many were compared in about `seconds` of processor time. Raise ConfigError where calls differ.

        Runs are without values; small images have values where the module does not run without.
        """
        training, gradients, begun, looks = network.training, torch.is_grad_enabled(), time.thread_time(), 0
        how: dict[str, Any] = {"gradients": gradients, "widest": inf}
        for batch, size in dict.fromkeys(images):
            key = batch, size, training, gradients
            if key in self.known or time.thread_time() - begun > seconds:
                continue
            weights = self.source.probe(1, (1, 1))
            for fake in (True, False)[: 1 + (batch * prod(size) <= FEW)]:
                with suppress(OtherSizeError):  # whatever the module raises
                    again = self.source.run(batch, (size[0], size[1]), training, fake, **how)
                    depends = fake, training, gradients, weights.dtype, weights.device
                    pair = self.source.pairs.get(depends)
                    different = "not compared yet" if pair is None else differing(pair[0], again, other=pair[1])
                    if different:  # or the module has changed since those runs
                        pair = self.source.pairs[depends] = self.source.pair(self.sizes, training, fake, **how)
                        different = differing(pair[0], again, other=pair[1])
                    different = different or breaks_rule(self.placed, network.graph, network.bands, again)
                    # Other faults may come from the lack of values.
                    faults = (fault for fault in again.faults if "writ" in fault or " of the network" in fault)
                    if different := different or next(faults, None):
                        raise unsteady(different)
                    looks += 1
                    break
            self.known.add(key)
        return looks
