"""What the turns have shown, as plain values and as tables in markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.pipeline.contestants import SERIAL
from benchmarks.pipeline.turns import Entry, Line, bound_of
from benchmarks.spread import Spread, markdown, ratios

HEAD = (
    "who",
    "seconds a step",
    "speed-up over one process",
    "over one of the same layout",
    "time over ours",
    "CPU seconds, of the system's",
    "bytes sent",
    "messages",
    "busy seconds a stage",
    "bubble",
    "gradients differ by",
)
ACCOUNT_HEAD = (
    "who",
    "stages",
    "work: one process over all stages' busy seconds",
    "balance: their mean over the slowest's",
    "filled: the slowest's over the step",
    "speed-up, the product",
    "filled, by the schedule's formula",
)


def rows(found: dict[str, Entry], base: str, ours: str) -> list[dict[str, Any]]:
    """A row for each contestant; speed-ups over `base` and ratios over `ours` of the same turn."""
    return [_row(entry, found, found[base], found[ours]) for entry in found.values()]


def _row(entry: Entry, found: dict[str, Entry], base: Entry, ours: Entry) -> dict[str, Any]:
    if entry.reason is not None:
        return {"who": entry.contestant.name, "reason": entry.reason}
    lines, serial = entry.lines, _serial_of(entry, found)
    row = {
        "who": entry.contestant.name,
        "seconds": _spread(lines, "seconds"),
        "speed_up": ratios(medians(base), medians(entry)).to_dict(),
        "speed_up_same_layout": ratios(medians(serial), medians(entry)).to_dict() if serial else None,
        "over_ours": ratios(medians(entry), medians(ours)).to_dict(),
        "user_seconds": _spread(lines, "user_seconds"),
        "system_seconds": _spread(lines, "system_seconds"),
        "balances": sorted({tuple(line["chunks" if "chunks" in line else "balance"]) for line in lines}),
        "gradients_differ_by": max(line["gradients_differ_by"] for line in lines),
        "bound": bound_of(entry, found),
    }
    row |= {key: sorted({line[key] for line in lines}) for key in ("bytes_sent", "messages")}
    if "busy_seconds" in lines[0]:
        row |= {"busy_seconds": _busy(lines), "bubble": _bubble(lines), "account": _account(entry, base)}
    return row


def _serial_of(entry: Entry, found: dict[str, Entry]) -> Entry | None:
    """One process in the layout of an entry, where it takes part."""
    every = (other for other in found.values() if other.contestant.program == SERIAL)
    return next((other for other in every if other.contestant.layout == entry.contestant.layout), None)


def medians(entry: Entry) -> list[float]:
    """Seconds of each turn."""
    return [statistics.median(line["seconds"]) for line in entry.lines]


def _spread(lines: Sequence[Line], key: str) -> dict[str, float]:
    return Spread.of([value for line in lines for value in line[key]]).to_dict()


def _busy(lines: Sequence[Line]) -> list[dict[str, float]]:
    """Of each stage."""
    stages = range(len(lines[0]["busy_seconds"]))
    return [Spread.of([value for line in lines for value in line["busy_seconds"][i]]).to_dict() for i in stages]


def _bubble(lines: Sequence[Line]) -> dict[str, float]:
    """The share of the stages' time in which they do not compute."""
    shares = []
    for line in lines:
        for seconds, *busy in zip(line["seconds"], *line["busy_seconds"], strict=True):
            shares.append(1 - sum(busy) / (len(busy) * seconds))
    return Spread.of(shares).to_dict()


def _account(entry: Entry, base: Entry) -> dict[str, Any]:
    """The speed-up of each turn as a product: stages x work x balance x filled."""
    parts: dict[str, list[float]] = {"work": [], "balance": [], "filled": []}
    for line, serial in zip(entry.lines, medians(base), strict=True):
        busy = [statistics.median(stage) for stage in line["busy_seconds"]]
        parts["work"].append(serial / sum(busy))
        parts["balance"].append(sum(busy) / len(busy) / max(busy))
        parts["filled"].append(max(busy) / statistics.median(line["seconds"]))
    line = entry.lines[0]
    formula = None if line["schedule"] == "folded" else filled_by_formula(line["stages"], line["micro_batches"])
    spreads = {name: Spread.of(values).to_dict() for name, values in parts.items()}
    return {"stages": line["stages"], **spreads, "filled_by_formula": formula}


def filled_by_formula(stages: int, micro_batches: int) -> float:
    """The share of a step in which a stage of gpipe or 1f1b computes, where all are alike and messages take no time."""
    return micro_batches / (micro_batches + stages - 1)


def side_by_side_table(found: Sequence[dict[str, Any]]) -> str:
    return markdown(HEAD, [_cells(row) for row in found])


def account_table(found: Sequence[dict[str, Any]]) -> str:
    """Where the speed-up comes from, and where it goes."""
    lines = []
    for row in found:
        if "account" in row:
            own = row["account"]
            shares = [Spread(**own[name]) for name in ("work", "balance", "filled")]
            formula = own["filled_by_formula"]
            theory = "" if formula is None else f"{formula:.3f}"
            lines.append([row["who"], own["stages"], *shares, Spread(**row["speed_up"]), theory])
    return markdown(ACCOUNT_HEAD, lines)


def _cells(row: dict[str, Any]) -> list[object]:
    if "reason" in row:
        return [row["who"], row["reason"], *[""] * (len(HEAD) - 2)]
    alike = row["speed_up_same_layout"]
    return [
        row["who"],
        Spread(**row["seconds"]),
        Spread(**row["speed_up"]),
        Spread(**alike) if alike else "",
        Spread(**row["over_ours"]),
        f"{row['user_seconds']['median'] + row['system_seconds']['median']:.3g}, {row['system_seconds']['median']:.2g}",
        " or ".join(f"{value:,}" for value in row["bytes_sent"]),
        " or ".join(f"{value:,}" for value in row["messages"]),
        ", ".join(f"{stage['median']:.3g}" for stage in row.get("busy_seconds", ())),
        f"{row['bubble']['median']:.1%}" if "bubble" in row else "",
        f"{row['gradients_differ_by']:.1e}",
    ]
