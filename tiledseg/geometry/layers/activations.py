"""Functions of single values, of which most are zero at zero; and the layer that computes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from tiledseg.geometry.layers.layer import Layer, Shape


@dataclass(frozen=True)
class ZeroAtZero(Layer):
    """A function of single values that is zero at zero."""

    keeps_zero = True
    kept_inputs = (0,)


@dataclass(frozen=True)
class Mark(Layer):
    """A place of its own for a tensor that a later layer takes up: it hands its input on."""

    keeps_zero = True
    hands_on = True
    gradient = "same"


@dataclass(frozen=True)
class Dropout(Layer):
    """Dropout of whole channels of a sample with `probability`, the same channels over the whole image."""

    probability: float = 0.0

    keeps_zero = True

    @property
    def hands_on(self) -> bool:
        return self.probability == 0

    @property
    def gradient(self) -> str:
        return "same" if self.hands_on else "new"

    def kept_besides(self, shape: Shape, width: int) -> int:
        return width * shape[0]  # a factor a channel

    def output_width(self, at_hand: int, width: int) -> int:
        return width


@dataclass(frozen=True)
class Activation(Layer):
    """Leaky ReLU, or another activation that is zero at zero."""

    negative_slope: float = 0.01

    keeps_zero = True
    overwrites = True
    kept_inputs = (0,)


@dataclass(frozen=True)
class Sigmoid(Layer):
    """1 / (1 + exp(-x)): what a gate multiplies by."""

    keeps_output = True
