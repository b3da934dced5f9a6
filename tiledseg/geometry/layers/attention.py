"""Attention over the image as a value: every pixel takes a mean of all pixels' values, by weights of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.layers.joins import sees_image
from tiledseg.geometry.layers.layer import Layer, Shape
from tiledseg.units import SINGLE_BYTES

WEIGHTS_AT_ONCE = 1 << 22  # the most weights of queries and keys in memory, over ranks: 16 MiB in float32


@dataclass(frozen=True)
class ImageAttention(Layer):
    """softmax(`factor` x queries x keys) x values, in `heads` parts of the channels. Its inputs are queries, keys and
    values.

    Keys and values are `ratio` times smaller along the dim, as SegFormer reduces them. Queries stay where they are.
    Keys and values of all ranks pass by, rank by rank (`models.layers.attention`); `passing` says so in a plan.
    """

    heads: int = 1
    ratio: int = 1
    factor: float = 1.0
    passing: bool = False

    arity = 3
    statistics = "image"
    sees_all = True
    can_rebuild = False  # keys and values of all ranks
    protects_output = True
    keeps_output = True
    kept_inputs = (0, 1, 2)
    is_cheap = False

    def required_input(self, out: Interval, index: int = 0) -> Interval:
        """Return the queries of `out`, or the keys and values at their place: those of other places pass by."""
        return Interval(out.start // self.ratio, -(-out.stop // self.ratio)) if index else out

    def output_size(self, size: int, *others: int) -> int:
        if any(other * self.ratio != size for other in others):
            raise GeometryError(
                f"it takes queries of {size} positions and keys of {' and '.join(map(str, others))}, not 1 to "
                f"{self.ratio}; choose another input size"
            )
        return size

    def scale(self, *scales: Fraction) -> Fraction:
        return scales[0]

    def fits_edge(self, *edges: int) -> bool:
        return all(edge * self.ratio == edges[0] for edge in edges[1:])

    def output_channels(self, channels: int, *others: int) -> int:
        return others[-1]

    def in_words(self, module: str | None) -> str:
        return sees_image(module, "attention over an image")

    def kept_besides(self, shape: Shape, width: int) -> int:
        return (
            max(width, SINGLE_BYTES) * self.heads * shape[1] * shape[2]
        )  # the logarithm of each query's sum of weights

    def transient_bytes(self, inputs: Sequence[int], shape: Shape) -> int:
        """Return nothing for torch's kernel; over ranks, wide copies of queries, of a block that passes, and of their
        gradients, and two sets of weights."""
        if not self.passing:
            return 0
        queries = shape[1] * shape[2]
        weights = min(WEIGHTS_AT_ONCE, self.heads * queries * max(1, queries // self.ratio**2))
        return 4 * inputs[0] + 4 * sum(inputs[1:]) + 2 * SINGLE_BYTES * weights
