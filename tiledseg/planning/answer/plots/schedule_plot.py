"""A pipeline's step as a figure: what each stage computes when."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from tiledseg.pipeline.schedule import Forward
from tiledseg.pipeline.simulation import Span
from tiledseg.planning.stages.staged_pipeline import StagedPipeline

_FORWARD, _BACKWARD = ("#1f6fb4", "#8fc1e8"), ("#d9822b", "#f6cd94")  # of a stage's first chunk, of its second
_NUMBERED = 1 / 90  # share of the step from which on a span has room for its micro-batch's number


def draw_schedule(axes: Axes, staged: StagedPipeline) -> None:
    """Rows are stages, time goes right; every span bears the number of its micro-batch, where there is room."""
    timeline, case = staged.timeline(), staged.case
    step = timeline.makespan
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            begin, length = 1000 * span.start, 1000 * (span.stop - span.start)
            axes.broken_barh(
                [(begin, length)], (rank - 0.4, 0.8), facecolor=_colour(staged, span), edgecolor="white", linewidth=0.4
            )
            if span.stop - span.start > _NUMBERED * step:
                number = str(span.action.micro_batch)
                axes.text(begin + length / 2, rank, number, ha="center", va="center", fontsize=6.5)
    axes.set(xlim=(0, 1000 * step), ylim=(case.stages - 0.5, -0.5), xlabel="time (ms)", ylabel="stage (GPU)")
    axes.set_yticks(range(case.stages))
    balance = ",".join(map(str, staged.balance))
    axes.set_title(
        f"A simulated step of {case.micro_batches} micro-batches: schedule {case.schedule}, balance [{balance}]; "
        f"{case.alone / step:.2f} x one GPU, {100 * timeline.busy_share:.0f} % busy",
        fontsize=10,
    )
    axes.legend(handles=_keys(staged), loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=5, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _colour(staged: StagedPipeline, span: Span) -> str:
    """Of the pass, and of which of the stage's chunks it is."""
    ranks = staged.pipeline.ranks
    second = span.action.chunk != ranks.index(ranks[span.action.chunk])
    return (_FORWARD if isinstance(span.action, Forward) else _BACKWARD)[second]


def _keys(staged: StagedPipeline) -> list[Patch]:
    two = len(staged.pipeline.ranks) > staged.case.stages
    words = (("forward", "backward"), ("forward, second chunk", "backward, second chunk"))
    shown = [
        Patch(facecolor=colours[second], label=words[second][kind])
        for second in range(1 + two)
        for kind, colours in enumerate((_FORWARD, _BACKWARD))
    ]
    return [*shown, Patch(facecolor="white", edgecolor="#bbbbbb", label="waits")]
