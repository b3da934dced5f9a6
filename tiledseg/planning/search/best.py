"""The best settings for a run: those of least predicted time among the dozen of least estimated time that fit.

All settings of the space are sorted by a cheap estimate. The best estimate of each kind comes first, so that an
estimate that is off for one kind does not hide it. The winner is the best of those that were planned; it is not proven
to be the best of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError, InputError
from tiledseg.planning.cost_model.step_time import StepTime
from tiledseg.planning.run.blocks import BlocksAsked
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.run.plan import plan_run
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.search.price import INEXACT, SLOWER, Discarded, Priced, Pricing
from tiledseg.planning.search.space import FREE, Candidate, Space

BEST = 5
PLANNED = 12  # settings that fit, whose plans are compared
MOST_PLANNED = 24  # plans, once one fits
_BLOCKS = 2, 4, 8, 16  # along a side, that are tried where nothing fits
TERMS = {
    "forward": "computing forward",
    "backward": "computing backward",
    "loss": "the loss",
    "reading": "reading",
    "gradients": "adding up gradients",
    "update": "the optimizer",
    "copies": "copies of exchanges",
    "again": "computing once more, and the store",
    "messages": "messages",
    "norms": "sums of norms",
    "all_reduce": "the all-reduce",
    "waiting": "waiting in the pipeline",
}
_LEAST = 0.02  # of the difference of both: terms that make up less of it are not named


@dataclass(frozen=True)
class Searched:
    """The best settings, best first; `other`: the best of another kind than the winner's, None where none was planned.
    `candidates`: the size of the space; `discarded`: how many are not among the best, by why; `examples`: one for each
    why."""

    best: tuple[Priced, ...]
    other: Priced | None
    candidates: int
    discarded: dict[str, int]
    examples: dict[str, Discarded]

    @property
    def winner(self) -> Priced:
        return self.best[0]

    @property
    def reason(self) -> str:
        """One line: the winner beside the best of another kind, else beside the second."""
        other = self.other or (self.best[1] if len(self.best) > 1 else None)
        return explained(self.winner, other) if other else f"nothing but {self.winner.in_words} can be"


def search(
    question: RunQuestion,
    host: int,
    best: int = BEST,
    free: Collection[str] = FREE,
    tick: Callable[[], None] = lambda: None,
) -> Searched:
    """Return the best settings for a run that trains, a step of whole images, on images like the question's largest.

    `host`: ranks of one host, which pipelines do not leave. `free`: settings that are searched; the others are as the
    question has them. `tick` is called for each plan, which takes a tenth of a second, or some where memory is short.

    Raises ConfigError where none can be, with what is lacking.
    """
    pricing = Pricing(question)
    question = pricing.question
    space = Space(question, pricing.footprint, pricing.shape, host, question.is_profiled, free)
    candidates = list(space.candidates())
    if not candidates:
        raise _no_candidates(space)
    discarded: list[Discarded] = []
    possible: list[Candidate] = []
    for candidate in candidates:
        fault = space.fault(candidate) if question.parallel.exact else None
        refused = Discarded(candidate, INEXACT, fault) if fault else pricing.too_large(candidate)
        if refused:
            discarded.append(refused)
        else:
            possible.append(candidate)
    priced: list[Priced] = []
    ordered = _in_order(possible, pricing)
    for place, candidate in enumerate(ordered):
        if len(priced) >= PLANNED or (priced and place >= MOST_PLANNED):
            reason = "is slower by an estimate"
            discarded += [Discarded(each, SLOWER, reason) for each in ordered[place:]]
            break
        tick()
        result = pricing.price(candidate)
        if isinstance(result, Priced):
            priced.append(result)
        else:
            discarded.append(result)
    if not priced:
        raise ConfigError(_nothing(pricing, discarded))
    if "fusion" in free:
        priced += _fused(priced, pricing)
    return _answer(priced, best, len(candidates), discarded)


def _in_order(possible: Sequence[Candidate], pricing: Pricing) -> list[Candidate]:
    """Return the candidates by their estimates, the best of each halo mode, of blocks and of pipelines first."""
    estimates = {candidate: pricing.estimate(candidate) for candidate in possible}
    ordered = sorted(possible, key=lambda candidate: estimates[candidate])
    first: dict[tuple[str, bool, bool], Candidate] = {}
    for each in ordered:
        first.setdefault((each.halo, each.blocks, each.stages > 1), each)
    return list(dict.fromkeys((*first.values(), *ordered)))


def _fused(priced: Sequence[Priced], pricing: Pricing) -> list[Priced]:
    """Return the best settings that share layers, with their best fusion where that is not a thin halo each."""
    layers = [each for each in priced if each.candidate.kind == "layer"]
    if not layers:
        return []
    best = min(layers, key=lambda each: each.seconds)
    fused = pricing.price(replace(best.candidate, fusion=None))
    if isinstance(fused, Discarded) or fused.plan.spread.fusion == 1:
        return []
    return [replace(fused, candidate=replace(fused.candidate, fusion=fused.plan.spread.fusion))]


def _answer(priced: Sequence[Priced], most: int, candidates: int, discarded: Sequence[Discarded]) -> Searched:
    ordered = sorted(priced, key=lambda each: each.seconds)
    other = next((each for each in ordered if each.candidate.kind != ordered[0].candidate.kind), None)
    counts = Counter(each.why for each in discarded)
    counts[SLOWER] += max(0, len(ordered) - most)
    examples = {each.why: each for each in reversed(discarded)}
    return Searched(tuple(ordered[:most]), other, candidates, dict(+counts), examples)


def differences(one: StepTime, other: StepTime) -> list[tuple[str, float]]:
    """Return the terms in words with the seconds that `one` takes more of each, the largest difference first."""
    terms = [(TERMS[name], mine - theirs) for name, mine, theirs in zip(TERMS, one, other, strict=True)]
    return sorted(((name, more) for name, more in terms if more), key=lambda each: -abs(each[1]))


def explained(winner: Priced, other: Priced) -> str:
    """Return one line with both, and the terms that make the difference."""
    apart = other.seconds - winner.seconds
    named = [
        f"{'+' if more > 0 else '-'}{1000 * abs(more):.4g} ms of {name}"
        for name, more in differences(winner.time, other.time)
        if abs(more) >= _LEAST * max(apart, 1e-9)
    ][:4]
    less = f"{100 * apart / other.seconds:.2g} % less than"
    return (
        f"{winner.in_words} takes {1000 * winner.seconds:.4g} ms a step, {less} {other.in_words} "
        f"({1000 * other.seconds:.4g} ms): {', '.join(named) or 'no term differs'}"
    )


def _no_candidates(space: Space) -> InputError:
    """Return why the given settings leave nothing to search: what their plan refuses, else that no search combines
    them."""
    try:
        plan_run(space.question)
    except InputError as error:
        return error
    parallel = space.question.parallel
    fixed = [
        f"parallel.{name} {shown(getattr(parallel, name))}"
        for name in sorted(FREE - set(space.free))
        if getattr(parallel, name) != getattr(Parallelism(), name)
    ]
    return ConfigError(
        f"no search combines {', '.join(fixed) or 'what is given'} for {space.question.ranks} ranks: pipelines need "
        "parallel.halo read with one word of recompute for all stages; leave one of them out, or parallel.auto"
    )


def _nothing(pricing: Pricing, discarded: Sequence[Discarded]) -> str:
    """Return why there is nothing to choose, with the settings nearest to the memory and what they lack."""
    question, counts = pricing.question, Counter(each.why for each in discarded)
    why = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    nearest = pricing.nearest(discarded)
    example = f"; {discarded[-1].candidate.in_words}: {discarded[-1].reason}"
    if nearest is not None and nearest.needed is not None:
        lacks = nearest.needed - question.memory
        example = f"; the nearest, {nearest.candidate.in_words}, needs {nearest.needed}, {lacks} bytes more"
    return (
        f"none of {len(discarded)} settings for {question.ranks} ranks of {question.memory} bytes can be ({why}"
        f"{example}); use {_blocks_that_fit(question)}more memory or ranks, a smaller model, or a lower precision"
    )


def _blocks_that_fit(question: RunQuestion) -> str:
    """Return blocks in a file as a remedy, where the search had none; nothing where they do not fit either."""
    if question.blocks is not None and question.blocks.in_file:
        return ""
    alone = replace(question, parallel=Parallelism(), grid=(1, 1))
    for side in _BLOCKS:
        try:
            plan = plan_run(replace(alone, blocks=BlocksAsked((side, side), in_file=True)))
        except InputError:
            return ""
        if plan.memory <= question.memory:
            taken = f"{plan.memory} bytes with {side} x {side} of them"
            return f"memory.blocks with memory.store, a folder on a local disk ({taken}), "
    return ""
