"""What `plan --window` answers: what a random window costs with its exact halo, and as a small image of its own."""

from __future__ import annotations

import math
from typing import Any

from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import largest_window, make_tiling
from tiledseg.planning.answer.text import Row, aligned, size_parts, words
from tiledseg.planning.question import Question
from tiledseg.planning.walk.step_memory import training_memory

_KINDS = {"exact": "with its halo", "none": "as an image of its own"}


def windows_part(question: Question) -> dict[str, Any]:
    """Of one window on the largest context: (height, width) that is computed, its pixels over those of the window, and
    bytes of a training step on it; and the windows that cover the raster's pixels once, an epoch."""
    assert question.window is not None, "asked for"
    side, graph = question.window, question.graph
    footprint = network_footprint(graph)
    contexts = {
        kind: make_tiling(raster, (1, 1), footprint).context_max
        for kind, raster in (("exact", largest_window(question.size, side, footprint)), ("none", (side, side)))
    }
    kinds = {
        kind: {
            "context": list(context),
            "efficiency": round(math.prod(context) / side**2, 4),
            "bytes": training_memory(graph, question.network.bands, context, question.bytes_per_value).total,
        }
        for kind, context in contexts.items()
    }
    return {"side": side, "epoch": math.ceil(math.prod(question.size) / side**2), **kinds}


def windows_table(part: dict[str, Any]) -> str:
    rows: list[Row] = [
        ("side", words(part["side"]), "px"),
        ("windows an epoch", f"{part['epoch']:,}", "their pixels, once"),
    ]
    for kind, remark in _KINDS.items():
        found = part[kind]
        number, unit = size_parts(found["bytes"])
        rows += [
            (f"context, {remark}", words(found["context"]), "px at most"),
            ("efficiency E", f"{found['efficiency']:.4f}", "context pixels / window pixels"),
            ("a training step", number, unit),
        ]
    return aligned(rows)
