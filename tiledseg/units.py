"""Numbers of bytes (`16GiB`) in configurations, and bytes of a value in each kind of tensor, by precision:

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

The first row identifies a precision; the others follow from it. bf16 and fp16 are PyTorch's autocast. On GPUs it
computes pixel and group norms in float32; on CPUs they stay in 16 bits."""

from __future__ import annotations

import math
import re

from tiledseg.errors import ConfigError

MOST_BYTES = 2**63 - 1
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)} | {"KB": 1000}


def parse_bytes(text: str) -> int:
    """Parse '16GiB', '16 GB', '512MiB', '1.5TiB' or a plain number of bytes. Raises ConfigError for other text, and for
    a plain number below 1 MiB: 16 probably means gibibytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?i?B?)\s*", text)
    if not match or match[2] not in _UNITS:
        raise ConfigError(f"memory '{text}' is no number of bytes; give 16GiB, 16GB, 512MiB or a plain number")
    size = float(match[1]) * _UNITS[match[2]]
    if not match[2] and 0 < size < 2**20:
        raise ConfigError(f"memory '{text}' has no unit; give {match[1]}GiB, or {match[1]}B for so many bytes")
    return int(size) if math.isfinite(size) else MOST_BYTES + 1


def size(count: int) -> str:
    """Format bytes in the largest fitting unit, such as '5.39 GiB'."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.2f} {unit}"
    return f"{count} B"


ACTIVATION_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
SINGLE_BYTES = 4  # float32
DOUBLE_BYTES = 8  # float64: statistics of norms, sums of gradients; on any device
SINGLE_NORMS = ("pixel", "group")  # computed in float32 by autocast
PIECE_VALUES = 1 << 16
_SUMS = 3  # twice as many values a channel, while rows are summed


def wide_bytes(activation_bytes: int) -> int:
    """Return the bytes of a value of a weight, gradient, input, loss or statistic: float32 at least."""
    return max(activation_bytes, SINGLE_BYTES)


def copy_bytes(activation_bytes: int) -> int:
    """Return the bytes of autocast's copy of a weight; 0 without autocast."""
    return activation_bytes if activation_bytes < SINGLE_BYTES else 0


def norm_rows(channels: int, height: int, width: int) -> int:
    """Return the number of rows that a norm on a CPU holds in float64 at once: those that fit the cache, at least 1."""
    return min(height, max(1, PIECE_VALUES // max(1, channels * width)))


def norm_work_bytes(channels: int, height: int, width: int) -> int:
    """Return the bytes of a norm's float64 rows (`norm_rows`), of tensor and gradient, and of its sums of channels."""
    return 2 * DOUBLE_BYTES * channels * (width * norm_rows(channels, height, width) + _SUMS)
