"""Comparison of a module's runs: at several sizes and batches, with gradients, in training."""

from __future__ import annotations

from tiledseg.tracing.calls import Call, Made, Record, values_in
from tiledseg.tracing.lowering import same_arguments, where

PLAINLY = {"in training": "in evaluation", "with gradients": "without gradients", "at its next call": "first"}


def differing(one: Record, other: Record) -> str | None:
    """Return where two runs go different ways; None where they do not."""
    for call, again in zip(one.calls, other.calls, strict=False):
        same = call.function == again.function and call.module is again.module and call.at == again.at
        if not same or list(_made(call)) != list(_made(again)):
            return f"{where(call)} comes next at {one.in_words}, and {where(again)} at {other.in_words}"
    if len(one.calls) != len(other.calls):
        longer = max(one, other, key=lambda each: len(each.calls))
        return f"{where(longer.calls[min(len(one.calls), len(other.calls))])} comes at {longer.in_words} only"
    return None


def differing_at_third(one: Record, other: Record, third: Record) -> str | None:
    """Return where a third run goes another way, or is given other numbers than two that agree; None if nowhere."""
    if different := differing(one, third):
        return different
    for call, again, last in zip(one.calls, other.calls, third.calls, strict=True):
        if same_arguments(call, again) and not same_arguments(call, last):
            return f"{where(call)} is given other numbers at {third.in_words} than at {one.in_words}"
    return None


def differing_otherwise(one: Record, trained: Record, how: str) -> str | None:
    """Return what a module does otherwise in a run of the same size, dropout apart; None where nothing.

    `how`: "in training", "with gradients" or "at its next call".
    """
    if different := differing(one, trained):
        plainly = f" {PLAINLY[how]}, and"
        return different.replace(f" at {one.in_words}, and", plainly, 1).replace(f" at {trained.in_words}", f" {how}")
    for call, again in zip(one.calls, trained.calls, strict=True):
        known = "dropout" in call.function or (call.function == "batch_norm" and how == "in training")
        if not known and not same_arguments(call, again):
            return f"{where(call)} is given other numbers {how}"
    others = [name for name in trained.drew if name != "torch"]
    if others:
        return f"it draws {others[0]}'s random numbers, and may do something else with others"
    if trained.moved:
        return f"it moves its buffer '{trained.moved[0]}', which no graph does"
    return trained.faults[0] if trained.faults else None


def _made(call: Call) -> list[Made]:
    return [value for value in values_in((call.arguments, call.keywords)) if isinstance(value, Made)]
