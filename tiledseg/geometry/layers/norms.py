"""Norms: their statistics, and their memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tiledseg.geometry.layers.layer import Layer, Shape
from tiledseg.units.widths import DOUBLE_BYTES, norm_bytes, norm_work_bytes


@dataclass(frozen=True)
class Norm(Layer):
    """Normalisation over `kind`: none, pixel (channels of each pixel), instance, group or batch.

    `affine`: True if it has weights. `running`: True for a batch norm with running statistics; `still`: True if these
    are constants in training too.
    """

    kind: str = "none"
    groups: int = 1
    affine: bool = True
    running: bool = True
    still: bool = False

    @property
    def keeps_zero(self) -> bool:
        return self.hands_on

    def parameters(self, channels: int) -> int:
        return 2 * channels if self.affine and not self.hands_on else 0

    @property
    def statistics(self) -> str | None:
        return None if self.still else {"instance": "image", "group": "image", "batch": "batch"}.get(self.kind)

    @property
    def tracks(self) -> bool:
        return self.kind == "batch" and self.running and not self.still

    @property
    def is_still(self) -> bool:
        return self.still

    @property
    def stilled(self) -> Norm:
        return replace(self, still=True) if self.tracks else self

    @property
    def needs_pixels(self) -> bool:
        return self.statistics is not None and self.kind != "group"  # which has several channels

    def in_words(self, module: str | None) -> str:
        return f"model.norm is {self.kind}" if module is None else f"'{module}' is a norm of kind {self.kind}"

    def statistic_sets(self, channels: int) -> int:
        return self.groups if self.kind == "group" else channels

    def shared_values(self, channels: int, ranks: int) -> tuple[int, int]:
        """Count a number, means and variances in a slot of each rank; backward gradients of mean and deviation."""
        sets = self.statistic_sets(channels)
        return ((1 + 2 * sets) * ranks, 2 * sets) if self.statistics else (0, 0)

    @property
    def hands_on(self) -> bool:
        return self.kind == "none"

    @property
    def kept_inputs(self) -> tuple[int, ...]:
        return () if self.hands_on else (0,)

    @property
    def gradient(self) -> str:
        return "same" if self.hands_on else "new"

    @property
    def returns_view(self) -> bool:
        return self.kind == "pixel"  # it computes in another layout

    def kept_besides(self, shape: Shape, width: int) -> int:
        """Return the bytes of statistics; 0 where these are constants. Pixel norm has a mean and a deviation a pixel.
        Others have, in float64, a scale a channel, a mean and a deviation a channel or group, and their count."""
        channels, height, columns = shape
        if self.still:
            return 0
        if self.kind == "pixel":
            return 2 * height * columns * self.input_width(width, width)
        return DOUBLE_BYTES * (channels + 2 * self.statistic_sets(channels) + 1)

    def gradient_bytes(self, input_bytes: int, shape: Shape) -> int:
        # The rows in which sums are taken are let go before it is made.
        return max(input_bytes, norm_work_bytes(*shape)) if self.statistics else input_bytes

    def input_width(self, at_hand: int, width: int) -> int:
        return at_hand if self.hands_on else norm_bytes(self.kind, width)

    def output_width(self, at_hand: int, width: int) -> int:
        return self.input_width(at_hand, width)
