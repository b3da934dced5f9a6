"""How fast a rank computes and talks: three assumed figures, from which `plan` predicts seconds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tiledseg.config_checks import Range
from tiledseg.errors import ConfigError
from tiledseg.planning.halo_traffic import Sent

FLOPS_PER_MULTIPLY_ADD = 2

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BYTES = {f"{prefix}B": scale for prefix, scale in _PREFIXES.items()}
_BYTES |= {f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGT", 1)}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Machine:
    """What one rank is assumed to reach. The defaults are assumptions about a V100-class GPU, not measurements.

    `flops`: floating point operations a second in convolutions, a multiply-add being two. `bandwidth`: bytes a second
    between neighbouring ranks. `latency`: seconds a message takes besides.
    """

    flops: float = 10e12
    bandwidth: float = 10e9
    latency: float = 20e-6

    def __post_init__(self) -> None:
        Range(1.0, 1e24).check("--flops", self.flops)
        Range(1.0, 1e24).check("--bandwidth", self.bandwidth)
        Range(0.0, 1e6).check("--latency", self.latency)

    def compute_seconds(self, multiply_adds: int) -> float:
        """So many multiply-adds: of a training step those of its backward pass too (`cost.step_work`)."""
        return multiply_adds * FLOPS_PER_MULTIPLY_ADD / self.flops

    def message_seconds(self, sent: Sent) -> float:
        """Messages sent one after the other; nothing is hidden behind computing."""
        return sent.messages * self.latency + sent.bytes / self.bandwidth

    def all_reduce_seconds(self, calls: int, size: int, ranks: int) -> float:
        """`calls` all-reduces of `size` bytes in all: each byte leaves a rank 2 (n - 1) / n times, in 2 log2 n rounds.

        The optimum of both terms (Thakur, Rabenseifner and Gropp, 2005); libraries come close to it.
        """
        rounds = 2 * math.ceil(math.log2(ranks))
        return calls * rounds * self.latency + 2 * (ranks - 1) / ranks * size / self.bandwidth


def parse_flops(text: str) -> float:
    """Operations a second of '10T', '10 TFLOPS', '500G' or a plain number. Raises ConfigError for anything else."""
    words = {
        f"{prefix}{unit}": s for prefix, s in _PREFIXES.items() for unit in ("", "FLOPS", "flops", "FLOP/s", "flop/s")
    }
    return _parse("--flops", text, words, "10T, 500G or a plain number of operations a second")


def parse_bandwidth(text: str) -> float:
    """Bytes a second of '25GB', '25 GB/s', '12.5GiB' or a plain number. Raises ConfigError for anything else."""
    words = {f"{unit}{per}": scale for unit, scale in _BYTES.items() for per in ("", "/s")} | {"": 1.0}
    return _parse("--bandwidth", text, words, "25GB, 10GiB or a plain number of bytes a second")


def parse_latency(text: str) -> float:
    """Seconds of '20us', '1.5 ms' or a plain number. Raises ConfigError for anything else."""
    return _parse("--latency", text, _SECONDS, "20us, 1ms or a plain number of seconds")


def _parse(flag: str, text: str, units: dict[str, float], remedy: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([A-Za-z/]*)\s*", text)
    if not match or match[2] not in units:
        raise ConfigError(f"{flag} is '{text}'; give {remedy}")
    return float(match[1]) * units[match[2]]
