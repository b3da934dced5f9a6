"""What is claimed of a GPU: for each figure the line of the battery that has it, and the limit that it keeps."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Lines = Sequence[Mapping[str, Any]]
MOST, LEAST = "at most", "at least"
KEPT: dict[str, Callable[[float, float], bool]] = {MOST: operator.le, LEAST: operator.ge}


@dataclass(frozen=True)
class Figure:
    """`what`: in words. It is the value of the line `name` of `part`, of its entry `key` where it has several, and over
    that of the line `over`, where there is one. `bound` and `limit`: what is promised; `shown`: how it is written."""

    what: str
    part: str
    name: str
    key: str | None
    bound: str
    limit: float
    shown: str = "{:.2f}"
    over: str | None = None

    def found(self, lines: Lines) -> float | None:
        """None where no line has it."""
        value = self._value(lines, self.name)
        if self.over is None or value is None:
            return value
        other = self._value(lines, self.over)
        return value / other if other else None

    def reason(self, lines: Lines) -> str:
        """Why there is none."""
        told = [line for line in lines if (line["part"], line["name"]) == (self.part, self.name)]
        return str(told[-1].get("reason", "it has no such value")) if told else "the battery did not come to it"

    def keeps(self, value: float) -> bool:
        return KEPT[self.bound](value, self.limit)

    @property
    def promise(self) -> str:
        return f"{self.bound} {self.shown.format(self.limit)}"

    def _value(self, lines: Lines, name: str) -> float | None:
        for line in reversed(lines):
            if (line["part"], line["name"], line["state"]) == (self.part, name, "ok"):
                value = line["value"] if self.key is None else line["value"].get(self.key)
                return None if value is None else float(value)
        return None


_STEP = "production step bf16"
SHARE = "share_of_matrix"
FIGURES = (
    Figure(
        "training step, bf16: share of an 8192^3 product's rate", "training_step", f"{_STEP} fast", SHARE, LEAST, 0.6
    ),
    Figure("the same, compiled", "training_step", f"{_STEP} compiled", SHARE, LEAST, 0.6),
    Figure("the same, deterministic", "training_step", f"{_STEP} default", SHARE, LEAST, 0.3),
    Figure("GPU busy while training", "training_step", "busy while training", None, LEAST, 0.97),
    Figure("GPU busy while mapping, bf16", "mapping", "bf16, grid auto", "busy_share", LEAST, 0.97),
    Figure(
        "a tile's way as stored over that as float32",
        "waiting",
        "input as stored, pinned",
        "ms",
        MOST,
        0.5,
        over="input as float32, pageable",
    ),
    Figure("of it hidden by kernels", "waiting", "input as stored beside a kernel", None, LEAST, 0.9),
    Figure("host waits a step", "waiting", "step: synchronisations", "count", MOST, 1, "{:.0f}"),
    Figure(
        "host waits a step with dropout", "waiting", "step with dropout: synchronisations", "count", MOST, 1, "{:.0f}"
    ),
    Figure("bytes beside convolutions, compiled, GB", "element_bytes", "compiled", "all", MOST, 13, "{:.1f}"),
    *(
        Figure(
            f"memory of a step at {side} px, bf16, over the plan's",
            "memory",
            f"step at {side} px, bf16",
            "ratio",
            MOST,
            1,
        )
        for side in (1024, 1536, 2048)
    ),
    Figure("largest image of a step, bf16, px", "memory", "largest image, bf16", "px", LEAST, 2048, "{:.0f}"),
    Figure("pipeline of one stage over a loop, 1024 px", "small_costs", "one stage at 1024 px", "ratio", MOST, 1.02),
    Figure(
        "seconds a message, layer mode, four ranks on the GPU over MPI",
        "shared_gpu",
        "layer, 2 x 2, mpi",
        "seconds_a_message",
        MOST,
        1e-3,
        "{:.5f}",
    ),
    *(
        Figure(f"{words}: times as long", "large_models", f"{way}: activations in {share}", "ratio", MOST, limit)
        for way, in_words, limits in (
            ("kept", "step that keeps {} of what plain PyTorch keeps", (1.06, 1.09, 1.12)),
            ("large_model_support", "step with {} of its peak, by large_model_support", (1.2, 1.35, 1.5)),
        )
        for share, limit in zip(("a half", "a third", "a quarter"), limits, strict=True)
        for words in (in_words.format(share),)
    ),
)
