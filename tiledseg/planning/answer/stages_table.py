"""The pipeline of the planner's answer as a table of plain text, with its drawing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiledseg.planning.answer.text import columns

_HEAD = ("stage", "layers", "work", "forward + backward", "in flight", "activations", "memory", "sent on", "skips", "")


def stages_title(part: dict[str, Any]) -> str:
    rows, cols = part["context"]
    modes = part["recompute"]
    again = modes[0] if len(set(modes)) == 1 else f"[{','.join(modes)}]"
    return (
        f"stages: a step of {part['micro_batches']} micro-batches of {rows} x {cols} px, {part['stages']} stages, "
        f"schedule {part['schedule']}{'' if again == 'never' else f', recompute {again}'}"
    )


def stages_table(part: dict[str, Any], size: Callable[[int], str]) -> str:
    """A row a stage, the balance, where the time goes, and the schedule drawn. `size` writes bytes."""
    lines = [columns([_HEAD, *(_cells(row, size) for row in part["by_stage"])])]
    step = part["step"]
    kind = "automatic" if part["automatic"] else "given"
    lines += [
        f"  balance, {kind}: [{','.join(map(str, part['balance']))}]",
        f"  the slowest stage has {100 / part['cap']:.1f} % of the work, so the cap is {part['cap']:.2f} x",
        f"  step {step['milliseconds']:.4g} ms = work {step['work_milliseconds']:.4g} + imbalance "
        f"{step['imbalance_milliseconds']:.4g} + "
        + (f"recompute {step['recompute_milliseconds']:.4g} + " if step["recompute_milliseconds"] else "")
        + f"bubble {step['bubble_milliseconds']:.4g} + transfers {step['transfer_milliseconds']:.4g}",
        f"  predicted speed-up {step['speed_up']:.2f} x over one GPU, {100 * step['busy_share']:.1f} % busy, "
        f"{size(part['bytes_step'])} sent a step",
        "  drawn for equal stages: F forward, B backward (two slots), . waiting"
        + ("; f, b: the stage's second chunk" if len(part["balance"]) > part["stages"] else ""),
        *(f"  {line}" for line in part["drawing"]),
    ]
    return "\n".join(lines)


def _cells(row: dict[str, Any], size: Callable[[int], str]) -> tuple[str, ...]:
    return (
        str(row["stage"]),
        ", ".join(f"{first}-{stop - 1}" for first, stop in row["layers"]),
        f"{100 * row['share']:.1f} %",
        f"{row['milliseconds']:.4g} ms",
        ", ".join(map(str, row["in_flight"])),
        size(row["memory"]["activations"]),
        size(row["memory"]["total"]),
        size(row["activation_bytes"]),
        size(row["skip_bytes"]),
        "" if row.get("fits", True) else "does NOT fit",
    )
