"""The shapes of a network's tensors, from the descriptions of its layers alone."""

from __future__ import annotations

from collections.abc import Sequence

from tiledseg.geometry.layer import Layer


def layer_shapes(layers: Sequence[Layer], bands: int, height: int, width: int) -> tuple[tuple[int, int, int], ...]:
    """(channels, height, width) of each layer's output, for an input of `bands` x `height` x `width`."""
    shapes: list[tuple[int, int, int]] = []
    shape = bands, height, width
    for layer in layers:
        shape = layer.output_channels(shape[0]), layer.output_size(shape[1]), layer.output_size(shape[2])
        shapes.append(shape)
    return tuple(shapes)
