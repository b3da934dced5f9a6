"""A look into declared modules: what the numbers of their check cannot show, by records of their calls."""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext, suppress
from math import inf, lcm
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from tiledseg.geometry.halo import round_up
from tiledseg.models.layers.declared import DeclaredModule
from tiledseg.tracing.calls import Record, differing
from tiledseg.tracing.record import record
from tiledseg.tracing.state import drawn_from, in_mode

# Batches and images, (height, width), of runs without values: thresholds lie before them.
VAST = ((8, (70_000, 24)), (1, (24, 70_000)), (5, (2_100, 2_100)))
Pair = tuple[int, int]
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16  # numbers are compared in the first alone


def _numbered(run: Record) -> list[Any]:
    """Return the calls of a run, with their whole numbers."""
    given = [(call, tree_leaves((call.arguments, dict(call.keywords)))) for call in run.calls]
    return [(call.function, call.at, *(leaf for leaf in each if isinstance(leaf, int))) for call, each in given]


def other_calls(module: DeclaredModule, training: bool) -> tuple[str | None, str | None]:
    """Return what a module does inside that depends on an image's size, its values, the batch or the calls before; and
    what it does in a backward pass of its own. By records of its calls."""
    units = [lcm(layer.size, layer.stride) for layer in (module.rows, module.cols)]

    def run(batch: int, least: Pair, fake: bool = False, module: DeclaredModule = module, **how: Any) -> Record:
        weight = next((p for p in module.parameters() if p.is_floating_point()), torch.zeros(()))
        size = [round_up(n, unit) for n, unit in zip(least, units, strict=True)]
        fakes = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
        with fakes or nullcontext(), drawn_from(0):
            x_BCHW = torch.randn(batch, module.channels, *size).to(weight.device, weight.dtype)
        quiet = logging.getLogger(FakeTensorMode.__module__)  # which prints pages of what is only tried here
        quiet.disabled, before = True, quiet.disabled
        try:
            with in_mode(module, training):
                return record(module, x_BCHW, fakes, opened=True, widest=inf, **how)
        finally:
            quiet.disabled = before

    far = [max(layer.reach, layer.size) for layer in (module.rows, module.cols)]
    one, other = run(2, (4 * far[0], 6 * far[1]), gradients=1), run(3, (10 * far[0], 8 * far[1]))
    records: list[tuple[Record, str | None, Record | None]] = []
    records.append((run(2, one.size, gradients=1, first=training), "at its next call", None))
    for batch, least in VAST:
        with suppress(Exception):  # whatever the module raises, or torch of fakes
            records.append((run(batch, least, fake=True), None, other))
    mode, faults = "in training " if training else "", list(one.faults)
    faults += [f"moves its buffer '{name}'" for name in one.moved]
    differ = (differing(one, again, how, second) for again, how, second in records)
    fault = next(iter(faults), None) or differing(one, other) or next(filter(None, differ), None)
    for dtype in () if fault else DTYPES:
        with suppress(Exception):
            again = run(2, one.size, True, copy.deepcopy(module).to(dtype))
            fault = fault or (_numbered(again) != _numbered(one) and f"does something else in {dtype}") or None
    return fault and mode + fault, next(iter(one.own_gradients), None)
