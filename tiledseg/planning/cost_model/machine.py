"""How fast a rank computes and talks, by a machine's profile or three assumed figures: so `plan` predicts seconds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace

from tiledseg.config.checks import Range
from tiledseg.errors import ConfigError
from tiledseg.planning.cost_model.layer_work import LayerWork, values_work
from tiledseg.planning.cost_model.profile import FLOPS_PER_MULTIPLY_ADD, Link, Pass, Profile
from tiledseg.planning.step.halo_traffic import Sent
from tiledseg.records import dataclass

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BYTES = {f"{prefix}B": scale for prefix, scale in _PREFIXES.items()}
_BYTES |= {f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGT", 1)}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Machine:
    """What one rank is assumed to reach. The defaults are assumptions about a V100-class GPU, not measurements.

    `flops`: floating point operations a second in convolutions, a multiply-add being two. `bandwidth`: bytes a second
    between neighbouring ranks. `latency`: seconds a message takes besides. `profile`: what is known of it beyond that,
    which then decides; without one nothing but multiply-adds and messages takes time.
    """

    flops: float = 10e12
    bandwidth: float = 10e9
    latency: float = 20e-6
    profile: Profile | None = None

    def __post_init__(self) -> None:
        Range(1.0, 1e24).check("--flops", self.flops)
        Range(1.0, 1e24).check("--bandwidth", self.bandwidth)
        Range(0.0, 1e6).check("--latency", self.latency)

    @staticmethod
    def known(profile: Profile, **given: float) -> Machine:
        """Of a profile, with figures that are `given` in place of its own."""
        profile = profile.with_figures(**given)
        host = profile.links["host"]
        return Machine(profile.flops["fp32"], host.bandwidth, host.latency, profile)

    def computing(self, precision: str) -> Machine:
        """With the rates of that precision: see `Profile.computing`."""
        return replace(self, profile=self.profile.computing(precision)) if self.profile else self

    @property
    def ranks_per_host(self) -> int:
        """GPUs of a node, one a rank; of the paper's machine where no profile says it."""
        return self.profile.ranks_per_host if self.profile else 6

    @property
    def memory(self) -> int | None:
        """Bytes of a rank's device; None where nobody knows them."""
        return self.profile.memory if self.profile else None

    def compute_seconds(self, multiply_adds: int) -> float:
        """So many multiply-adds at `flops`: of a training step those of its backward pass too (`cost.step_work`)."""
        return multiply_adds * FLOPS_PER_MULTIPLY_ADD / self.flops

    def layer(self, work: LayerWork, ranks: int = 1) -> Pass:
        """A layer on one rank, where `ranks` of the machine are at work."""
        if self.profile is None:
            forward = self.compute_seconds(work.multiply_adds)
            return Pass(forward, self.compute_seconds(work.multiply_adds * (1 + work.passes)) - forward)
        return self.profile.slowed(self.profile.passes(work), work, ranks)

    def layers(self, works: Iterable[LayerWork], ranks: int = 1) -> Pass:
        """One after the other."""
        total = Pass()
        for work in works:
            total = total.plus(self.layer(work, ranks))
        return total

    def values(self, kind: str, channels: int, pixels: int, width: int, moved: tuple[float, float], ranks: int) -> Pass:
        """What is no layer, and moves so many times its values' bytes, forward and backward; nothing without a
        profile."""
        if self.profile is None or not pixels:
            return Pass()
        work = values_work(kind, channels, pixels, width, *(width * times for times in moved))
        return self.profile.slowed(self.profile.passes(work), work, ranks)

    def gradient_sum(self, weights: int, tensors: int) -> float:
        """Adding a tile's gradients to the sums of a step, where rates of layers do not have it in them."""
        known = self.profile
        return weights * known.gradient + tensors * known.launch if known and known.gradient else 0.0

    def update(self, weights: int, tensors: int) -> float:
        """What is done to each weight once a step."""
        known = self.profile
        return weights * known.update + tensors * known.tensor if known else 0.0

    def reading(self, values: int, tiles: int, ranks: int) -> float:
        """Reading rasters, where no core is free to do it meanwhile."""
        known = self.profile
        if known is None or self.has_free_core(ranks):
            return 0.0
        return values * known.reading + tiles * known.opening

    def by_the_clock(self, ranks: int) -> float:
        """How many times longer than alone `ranks` of a host compute that have more threads than it has cores."""
        return self.profile.by_the_clock(ranks) if self.profile else 1.0

    def taking_turns(self, ranks: int) -> float:
        """Threads a core, where they are more than the cores; else 1."""
        return self.profile.oversubscribed(min(ranks, self.profile.ranks_per_host)) if self.profile else 1.0

    def has_free_core(self, ranks: int) -> bool:
        """Whether something is free to read and to speak while `ranks` compute: a core, or a device's whole host."""
        known = self.profile
        return known is None or known.cores is None or ranks * known.threads < known.cores

    def message_seconds(self, sent: Sent, ranks: int = 1) -> float:
        """Messages of one of `ranks` ranks sent one after the other; nothing is hidden behind computing."""
        link = self._link(ranks)
        return sent.messages * link.latency + sent.bytes / link.bandwidth

    def all_reduce_seconds(self, calls: int, size: int, ranks: int) -> float:
        """`calls` all-reduces of `size` bytes in all: each byte leaves a rank 2 (n - 1) / n times, in 2 log2 n rounds.

        The optimum of both terms (Thakur, Rabenseifner and Gropp, 2005); libraries come close to it.
        """
        rounds, link = 2 * math.ceil(math.log2(ranks)), self._link(ranks)
        return calls * rounds * link.reduce_latency + 2 * (ranks - 1) / ranks * size / link.reduce_bandwidth

    def hidden(self, all_reduce: float, buckets: int, backward: float, ranks: int) -> float:
        """What of an all-reduce passes while `backward` is computed: of all its buckets but the last one."""
        known = self.profile
        if known is None or not self.has_free_core(ranks):
            return 0.0
        return min(all_reduce * (buckets - 1) / buckets, backward) if buckets else 0.0

    def _link(self, ranks: int) -> Link:
        if self.profile is None:
            return Link(self.latency, self.bandwidth, self.latency, self.bandwidth)
        return self.profile.of(ranks).link(ranks)


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
