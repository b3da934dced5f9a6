"""The halo modes as a table of plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

_HEAD = ("mode", "E", "redundant work", "messages", "bytes sent", "memory", "predicted", "")
_WIDTH = 116


def modes_title(part: dict[str, Any]) -> str:
    """What the table is about."""
    rows, cols = part["mesh"]
    return f"modes: a training step on one image, {rows} x {cols} ranks, by the busiest rank"


def modes_table(part: dict[str, Any], size: Callable[[int], str]) -> str:
    """A row a mode, what the seconds rest on, the all-reduce that all share, and the choice. `size` writes bytes."""
    choice, machine = part["choice"], part["machine"]
    possible = [row for row in part["costs"] if row["possible"]]
    cells = [_HEAD, *(_cells(row, choice, size) for row in possible)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEAD))]
    lines = [
        "  ".join(["", line[0].ljust(widths[0]), *map(str.rjust, line[1:-1], widths[1:-1]), line[-1]]).rstrip()
        for line in cells
    ]
    lines += [_wrapped(f"{row['mode']}: not possible: {row['reason']}") for row in part["costs"] if not row["possible"]]
    reduce = part["gradient_all_reduce"]
    lines.append(
        _wrapped(
            f"in all modes: one all-reduce of gradients, {size(reduce['bytes'])}, {reduce['milliseconds']:.4g} ms of "
            "the time predicted"
        )
    )
    sums = [row for row in possible if row["norm_all_reduces"]["calls"]]
    if sums:
        found = sums[0]["norm_all_reduces"]
        lines.append(_wrapped(f"layer: {found['calls']} all-reduces of norm statistics, {size(found['bytes'])}"))
    lines.append(
        _wrapped(
            f"assumed, not measured: {machine['flops'] / 1e12:.4g} Tflop/s a rank, "
            f"{machine['bandwidth'] / 1e9:.4g} GB/s between ranks, {machine['latency'] * 1e6:.4g} us a message"
        )
    )
    lines.append(_wrapped(f"choice: {choice['reason']}"))
    return "\n".join(lines)


def _cells(row: dict[str, Any], choice: dict[str, Any], size: Callable[[int], str]) -> tuple[str, ...]:
    fusion = row["fusion"]
    remarks = [
        "chosen" * ((row["mode"], fusion) == (choice["mode"], choice["fusion"])),
        "not exact" * (not row["exact"]),
        "does NOT fit" * (not row.get("fits", True)),
    ]
    return (
        row["mode"] if fusion in (None, 1) else f"{row['mode']}, fusion {fusion}",
        f"{row['efficiency']:.4f}",
        f"{row['redundant_percent']:.2f} %",
        f"{row['messages_rank']:,}",
        size(row["bytes_rank"]),
        size(row["memory_rank"]),
        f"{row['milliseconds']:.4g} ms",
        ", ".join(filter(None, remarks)),
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
