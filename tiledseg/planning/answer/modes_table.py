"""The halo modes as a table of plain text."""

from __future__ import annotations

from typing import Any

from tiledseg.planning.answer.text import columns, size, wrapped
from tiledseg.planning.modes.mode_choice import mode_words

_HEAD = ("mode", "E", "redundant work", "reads", "messages", "bytes sent", "memory", "predicted", "")


def modes_title(part: dict[str, Any]) -> str:
    rows, cols = part["mesh"]
    return f"modes: a training step on one image, {rows} x {cols} ranks, by the busiest rank"


def modes_table(part: dict[str, Any]) -> str:
    """A row a mode, what the seconds rest on, the all-reduce that all share, and the choice."""
    choice, machine = part["choice"], part["machine"]
    possible = [row for row in part["costs"] if row["possible"]]
    lines = [columns([_HEAD, *(_cells(row, choice) for row in possible)])]
    lines += [wrapped(f"{row['mode']}: not possible: {row['reason']}") for row in part["costs"] if not row["possible"]]
    reduce = part["gradient_all_reduce"]
    lines.append(
        wrapped(
            f"in all modes: one all-reduce of gradients, {size(reduce['bytes'])}, {reduce['milliseconds']:.4g} ms of "
            "the time predicted"
        )
    )
    sums = [row for row in possible if row["norm_all_reduces"]["calls"]]
    if sums:
        found = sums[0]["norm_all_reduces"]
        lines.append(wrapped(f"layer: {found['calls']} all-reduces of norm statistics, {size(found['bytes'])}"))
    lines.append(
        wrapped(
            f"{_known(machine)}: {machine['flops'] / 1e12:.4g} Tflop/s a rank, "
            f"{machine['bandwidth'] / 1e9:.4g} GB/s between ranks, {machine['latency'] * 1e6:.4g} us a message"
        )
    )
    if machine.get("base_bytes"):
        lines.append(wrapped(f"the runtime itself, beside that memory: {size(machine['base_bytes'])} a rank"))
    lines.append(wrapped(f"choice: {choice['reason']}"))
    return "\n".join(lines)


def _known(machine: dict[str, Any]) -> str:
    """Where the figures are from."""
    if "profile" not in machine:
        return "assumed, not measured"
    return f"{machine['profile']}, {'measured' if machine['measured'] else 'by its datasheet, not measured'}"


def _cells(row: dict[str, Any], choice: dict[str, Any]) -> tuple[str, ...]:
    fusion = row["fusion"]
    remarks = [
        "chosen" * ((row["mode"], fusion) == (choice["mode"], choice["fusion"])),
        "not exact" * (not row["exact"]),
        "does NOT fit" * (not row.get("fits", True)),
    ]
    return (
        mode_words(row["mode"], fusion),
        f"{row['efficiency']:.4f}",
        f"{row['redundant_percent']:.2f} %",
        f"{row['pixels_read_rank'] / 1e6:.4g} Mpx",
        f"{row['messages_rank']:,}",
        size(row["bytes_rank"]),
        size(row["memory_rank"]),
        f"{row['milliseconds']:.4g} ms",
        ", ".join(filter(None, remarks)),
    )
