"""Bytes of a value in each kind of tensor, by precision.

    | tensor | fp32 | bf16, fp16 | fp64 |
    | --- | --- | --- | --- |
    | output of a convolution, and what follows in its dtype: activations, halos, messages between stages | 4 | 2 | 8 |
    | weights, gradients, values of the optimizer | 4 | 4 | 8 |
    | copy of the weights that autocast casts | - | 2 | - |
    | input of the network | 4 | 4 | 8 |
    | output of a pixel or group norm, its halos | 4 | 4 | 8 |
    | loss, statistics of a pixel norm | 4 | 4 | 8 |
    | statistics of other norms | 8 | 8 | 8 |
    | sums of gradients over tiles and ranks | 8 | 8 | 8 |

The first row names a precision for all that counts: the others follow from it. Both bf16 and fp16 are autocast of
PyTorch. Its list for GPUs computes pixel and group norms in float32 (on a CPU it leaves them in 16 bits).
"""

from __future__ import annotations

ACTIVATION_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
SINGLE_BYTES = 4  # float32
DOUBLE_BYTES = 8  # float64: statistics of norms, sums of gradients; on any device
SINGLE_NORMS = ("pixel", "group")  # autocast computes them in float32
PIECE_VALUES = 1 << 16
_SUMS = 3  # twice as many values a channel, while rows are summed


def wide_bytes(activation_bytes: int) -> int:
    """Return the bytes of a weight, a gradient, an input, a loss or a statistic: float32 at least."""
    return max(activation_bytes, SINGLE_BYTES)


def copy_bytes(activation_bytes: int) -> int:
    """Return the bytes of the copy of a weight that autocast keeps; 0 without autocast."""
    return activation_bytes if activation_bytes < SINGLE_BYTES else 0


def norm_bytes(kind: str, activation_bytes: int) -> int:
    """Return the bytes of a value of the input and the output of a norm of this kind."""
    return wide_bytes(activation_bytes) if kind in SINGLE_NORMS else activation_bytes


def norm_rows(channels: int, height: int, width: int) -> int:
    """Return the rows of a tensor that a norm on the CPU holds in float64 at once: as many as fit a cache, or one."""
    return min(height, max(1, PIECE_VALUES // max(1, channels * width)))


def norm_work_bytes(channels: int, height: int, width: int) -> int:
    """Return the bytes of such rows of a tensor and of its gradient, and of sums of each channel."""
    return 2 * DOUBLE_BYTES * channels * (width * norm_rows(channels, height, width) + _SUMS)
