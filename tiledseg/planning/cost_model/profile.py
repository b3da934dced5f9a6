"""What is known of a machine: rates of layers, memory, links, disk. A value; `profile_file` reads and checks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import NamedTuple

from tiledseg.planning.cost_model.layer_work import CONVOLUTIONS, LayerWork
from tiledseg.planning.cost_model.rates import Rate, Table
from tiledseg.records import dataclass

FLOPS_PER_MULTIPLY_ADD = 2
_PRECISIONS = {4: "fp32", 2: "bf16", 8: "fp64"}  # by bytes of a value; see `Profile.computing`
_LIKE = {"wide convolution": "convolution"}  # whose rates count where a class was not measured


class Pass(NamedTuple):
    """Seconds of a forward and of a backward pass."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def step(self) -> float:
        return self.forward + self.backward

    def plus(self, other: Pass) -> Pass:
        return Pass(self.forward + other.forward, self.backward + other.backward)

    def times(self, factor: float) -> Pass:
        return Pass(self.forward * factor, self.backward * factor)


class Sharing(NamedTuple):
    """How many times longer a layer takes where all cores are at work: bound by computing, and by memory."""

    computing: float = 1.0
    memory: float = 1.0


class CopyRates(NamedTuple):
    """Bytes a second that are written to a store, and read from it."""

    written: float
    read: float


class Crowd(NamedTuple):
    """What holds in place of a profile's own figures where a host has more ranks than cores, by the clock: of exchanges
    and norms, and of an all-reduce. `turns`: how many times longer layers take than where as many cores as threads did
    the same one after the other."""

    turns: float
    exchange: float
    window: float
    summed: float
    norm: float
    reduce_latency: float
    reduce_bandwidth: float


class Link(NamedTuple):
    """Between two ranks: seconds a message, bytes a second; of an all-reduce likewise (see `Machine`)."""

    latency: float
    bandwidth: float
    reduce_latency: float
    reduce_bandwidth: float


@dataclass(frozen=True)
class Profile:
    """One rank of a machine, and what it shares with others.

    `flops` by precision, `bandwidth` of memory (bytes/s): the rates of what no table has. `tables` by precision and
    class. `launch`: seconds of any kernel, besides. `links`: `host`, `network`. `cores`: that `ranks_per_host` ranks of
    `threads` threads share (None: each rank has a device of its own). `measured`: by `plan --calibrate`, else from
    datasheets. `base`: bytes of the runtime itself. `disk`: a host's local one, which its ranks share, and
    `host_store`: the host's memory, to which each rank's device has a way of its own; None where nobody knows them.
    The rest are seconds:

    `gradient`, a weight of a tile whose gradient is added up (0: layers have it in them); `update`, a weight of a
    step's update, and `tensor`, a tensor of it; `reading`, a value of a raster, and `opening`, a tile; `first_touch`, a
    byte of memory that the system clears for a process; `exchange`, one besides its messages, `window`, a byte of what
    it makes (0: as a copy); where ranks sum a norm's statistics, `norm`, one of these sums besides its all-reduce, and
    `summed`, a byte more of what the norm takes and gives. `crowded`: see `Crowd`; None where it was not measured.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    launch: float
    links: Mapping[str, Link]
    ranks_per_host: int
    tables: Mapping[str, Mapping[str, Table]] = field(default_factory=dict)
    memory: int | None = None
    cores: int | None = None
    threads: int = 1
    sharing: Sharing = field(default_factory=Sharing)
    gradient: float = 0.0
    update: float = 0.0
    tensor: float = 0.0
    reading: float = 0.0
    opening: float = 0.0
    first_touch: float = 0.0
    exchange: float = 0.0
    window: float = 0.0
    summed: float = 0.0
    norm: float = 0.0
    crowded: Crowd | None = None
    base: int = 0
    disk: CopyRates | None = None
    host_store: CopyRates | None = None
    measured: bool = False

    @property
    def has_devices(self) -> bool:
        """Whether each rank has a device of its own, with a memory that is not its host's."""
        return self.cores is None

    def with_figures(
        self, flops: float | None = None, bandwidth: float | None = None, latency: float | None = None
    ) -> Profile:
        """With one rate of convolutions, or one speed or latency of all links, in place of what is known of them."""
        profile = self
        if flops is not None:
            rest = {
                precision: {kind: table for kind, table in tables.items() if kind not in CONVOLUTIONS}
                for precision, tables in self.tables.items()
            }
            profile = replace(profile, flops=dict.fromkeys(self.flops, flops), tables=rest)
        speed = {} if bandwidth is None else {"bandwidth": bandwidth, "reduce_bandwidth": bandwidth}
        wait = {} if latency is None else {"latency": latency, "reduce_latency": latency}
        return replace(profile, links={name: link._replace(**speed, **wait) for name, link in self.links.items()})

    def computing(self, precision: str) -> Profile:
        """With the rates of fp16 for values of two bytes, if that is the precision: layers know their bytes alone."""
        if precision != "fp16":
            return self
        tables = {**self.tables, "bf16": self.tables.get("fp16") or self.tables.get("fp32", {})}
        return replace(self, flops={**self.flops, "bf16": self.flops["fp16"]}, tables=tables)

    def passes(self, work: LayerWork) -> Pass:
        """Seconds of a layer on one rank that has the machine to itself."""
        if not work.pixels:
            return Pass()
        rate = self._rate(work)
        if work.kind in CONVOLUTIONS:
            operations = FLOPS_PER_MULTIPLY_ADD * work.multiply_adds
            forward, backward = operations / rate.forward, work.passes * operations / rate.backward
            if not self._table(work):  # flat rates: memory may be slower
                forward = max(forward, work.forward_bytes / self.bandwidth)
                backward = max(backward, work.backward_bytes / self.bandwidth)
        else:
            forward, backward = work.forward_bytes / rate.forward, work.backward_bytes / rate.backward
        return Pass((self.launch + forward) if forward else 0.0, (self.launch + backward) if work.passes else 0.0)

    def _table(self, work: LayerWork) -> Table | None:
        tables = self.tables.get(_PRECISIONS[work.width], {})
        return tables.get(work.kind) or tables.get(_LIKE.get(work.kind, ""))

    def _rate(self, work: LayerWork) -> Rate:
        table = self._table(work)
        if table is not None:
            return table.rate(work.ratio, work.channels, work.pixels)
        flat = self.flops[_PRECISIONS[work.width]] if work.kind in CONVOLUTIONS else self.bandwidth
        return Rate(flat, flat)

    def slowed(self, time: Pass, work: LayerWork, ranks: int) -> Pass:
        """The same where `ranks` of a host are at work."""
        if self.cores is None:
            return time
        most = self.sharing.computing if work.kind in CONVOLUTIONS else self.sharing.memory
        others = max(self.cores - self.threads, 1)
        busy = min(ranks * self.threads, self.cores) - min(self.threads, self.cores)
        return time.times(1 + (most - 1) * busy / others)

    def oversubscribed(self, ranks: int) -> float:
        """How many times longer by the clock `ranks` of a host take that have more threads than it has cores."""
        return 1.0 if self.cores is None else max(1.0, ranks * self.threads / self.cores)

    def of(self, ranks: int) -> Profile:
        """With what holds where `ranks` are at work, of exchanges and norms."""
        over = self.oversubscribed(min(ranks, self.ranks_per_host))
        if over == 1:
            return self
        if self.crowded is None:
            return replace(self, **{key: over * getattr(self, key) for key in ("exchange", "window", "summed", "norm")})
        known = self.crowded._asdict()
        host = self.links["host"]._replace(**{key: known.pop(key) for key in ("reduce_latency", "reduce_bandwidth")})
        del known["turns"]
        return replace(self, links={**self.links, "host": host}, **known)

    def by_the_clock(self, ranks: int) -> float:
        """How many times longer than on cores of their own the layers of `ranks` take, which take turns on them."""
        over = self.oversubscribed(min(ranks, self.ranks_per_host))
        return over * self.crowded.turns if over > 1 and self.crowded else over

    def link(self, ranks: int) -> Link:
        """The slowest among so many ranks; hosts share their network among their ranks."""
        if ranks <= self.ranks_per_host:
            return self.links["host"]
        network = self.links["network"]
        return network._replace(bandwidth=network.bandwidth / self.ranks_per_host)
