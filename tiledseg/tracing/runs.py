"""Whether two runs of a module are one: at two sizes, and in evaluation and in training."""

from __future__ import annotations

import itertools

from tiledseg.tracing.lowering import constants, where
from tiledseg.tracing.record import Call, Made, Record, values_in


def differing(one: Record, other: Record) -> str | None:
    """Where two runs go different ways; None where they do not."""
    for call, again in zip(one.calls, other.calls, strict=False):
        same = call.function == again.function and call.module is again.module and call.at == again.at
        if not same or list(_made(call)) != list(_made(again)):
            return f"{where(call)} comes next at {one.size} pixels, and {where(again)} at {other.size}"
    if len(one.calls) != len(other.calls):
        longer = max(one, other, key=lambda each: len(each.calls))
        return f"{where(longer.calls[min(len(one.calls), len(other.calls))])} comes at {longer.size} pixels only"
    return None


def differing_in_training(one: Record, trained: Record) -> str | None:
    """What a module does otherwise in training than in evaluation, dropout apart; None where nothing."""
    different = differing(one, trained)
    if different:
        return different.replace(f" at {one.size} pixels, and", " in evaluation, and", 1).replace(
            f" at {trained.size}", " in training"
        )
    for call, again in zip(one.calls, trained.calls, strict=True):
        if "dropout" not in call.function and constants(call) != constants(again):
            return f"{where(call)} is given other numbers"
    others = [name for name in trained.drew if name != "torch"]
    if others:
        return f"it draws {others[0]}'s random numbers, and may do something else with others"
    if one.given != trained.given:
        pairs = itertools.zip_longest(one.given, trained.given)
        first = next(entry for pair in pairs if pair[0] != pair[1] for entry in pair if entry is not None)
        return f"{first[0]} computes other things from its weights"
    return None


def _made(call: Call) -> list[Made]:
    return [value for value in values_in((call.arguments, call.keywords)) if isinstance(value, Made)]
