"""The rows of the paper's table as tables in markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.pipeline.paper_simulation import BY_HAND_STAGES, Row, Simulated
from benchmarks.spread import markdown
from tiledseg.pipeline.balance import BalancePrices, choose_balances


def caps_table(simulated: Sequence[Simulated], rows: Sequence[Row]) -> str:
    """A line a case: what balances allow on 6 stages, and what is simulated."""
    head = ("network", "px", "s measured", "cap by hand: work, time", "our cap: work, time, folded",
            "by hand: gpipe, 1f1b", "ours: gpipe, 1f1b, folded")  # fmt: skip
    lines = []
    for one in simulated:
        case = one.case
        found = {
            (row.schedule, row.by_hand): row
            for row in rows
            if (row.network, row.model, row.size, row.stages) == (case.network, case.model, case.size, BY_HAND_STAGES)
        }
        work = [float(value) for value in one.work]
        best = one.cap(choose_balances(BalancePrices(work), BY_HAND_STAGES)[0], work)
        hand, ours, folded = found["1f1b", True], found["1f1b", False], found["folded", False]
        lines.append((
            f"{case.network}, {case.model}", case.size, f"{one.measured:.3g}",
            f"{one.cap(one.by_hand(), work):.2f}, {hand.cap:.2f}",
            f"{best:.2f}, {ours.cap:.2f}, {folded.cap:.2f}",
            f"{found['gpipe', True].speed_up:.2f}, {hand.speed_up:.2f}",
            f"{found['gpipe', False].speed_up:.2f}, {ours.speed_up:.2f}, **{folded.speed_up:.2f}**",
        ))  # fmt: skip
    return markdown(head, lines)


def shares_table(rows: Sequence[Row], size: int) -> str:
    """Where the time of a step goes on 6 stages, and the bytes of a step."""
    head = ("network", "balance, schedule", "speed-up", "work", "imbalance", "bubble", "transfers", "GB a step")
    chosen = [row for row in rows if row.stages == BY_HAND_STAGES and row.size == size]
    return markdown(head, [
        (f"{r.network}, {r.model}", f"{'by hand' if r.by_hand else 'ours'}, {r.schedule}", f"{r.speed_up:.2f}",
         *(f"{100 * share:.0f} %" for share in (r.work, r.imbalance, r.bubble, r.transfers)), f"{r.bytes / 1e9:.1f}")
        for r in sorted(chosen, key=lambda r: (r.network, r.model, not r.by_hand, r.schedule))
    ])  # fmt: skip


def speed_table(rows: Sequence[Row]) -> str:
    """Our speed-ups, stage by stage."""
    stages = sorted({row.stages for row in rows})
    head = ("network", "px", "schedule", *(f"{n} stages" for n in stages))
    found: dict[tuple[str, int, str], dict[int, float]] = {}
    for row in rows:
        if not row.by_hand and row.schedule != "gpipe":
            key = f"{row.network}, {row.model}", row.size, row.schedule
            found.setdefault(key, {})[row.stages] = row.speed_up
    return markdown(head, [(*key, *(f"{ups[n]:.2f}" for n in stages)) for key, ups in found.items()])
