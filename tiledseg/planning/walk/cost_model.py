"""The speed of a rank, a roofline of eight figures; a store of offloaded tensors; and seconds of a network's steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import NamedTuple

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.planning.walk.cost import FLOPS_PER_MULTIPLY_ADD, ForwardWalk, LayerCost, tile_walk
from tiledseg.units import DOUBLE_BYTES, wide_bytes


class Link(NamedTuple):
    """The connection of two ranks: seconds a message, and bytes a second."""

    latency: float
    bandwidth: float


class CopyRates(NamedTuple):
    """The speed of a store: bytes a second that are written to it, and read from it."""

    written: float
    read: float


@dataclass(frozen=True)
class Machine:
    """One rank of a machine. A kernel takes max(operations / flops, bytes / memory_bandwidth) + launch seconds.

    Figures. `flops`: floating point operations a second of convolutions, in the precision of a run. `rates`: the same
    by precision. `lanes`: channels that a convolution computes at once. `memory_bandwidth`: bytes a second. `launch`:
    seconds a kernel. `latency`, `bandwidth`: the link of two ranks of a host. `network`: that of two hosts, which the
    ranks of a host share (None: the same). `disk`: the store of a host, which its ranks share. `host_store`: the way of
    one device to its host's memory. A store is None where it is not known. `reading`: seconds a value of a raster.

    Facts. `name`: empty if the figures are assumed, of a V100-class GPU. `measured`: the figures are measured.
    `memory`: of a rank's device. `cores`: shared by `ranks_per_host` ranks of `threads` threads (None: each rank has a
    device). `base`: bytes of the runtime itself.
    """

    flops: float = 10e12
    bandwidth: float = 10e9
    latency: float = 20e-6
    name: str = ""
    measured: bool = False
    rates: Mapping[str, float] = field(default_factory=dict)
    lanes: int = 1
    memory_bandwidth: float = math.inf
    launch: float = 0.0
    network: Link | None = None
    disk: CopyRates | None = None
    host_store: CopyRates | None = None
    reading: float = 0.0
    ranks_per_host: int = 6
    memory: int | None = None
    cores: int | None = None
    threads: int = 1
    base: int = 0

    @property
    def known(self) -> bool:
        """Return True if the figures are of a profile, False if they are assumed."""
        return bool(self.name)

    @property
    def has_devices(self) -> bool:
        """Return True if each rank has a device, with a memory that is not its host's."""
        return self.cores is None

    def computing(self, precision: str) -> Machine:
        """Take the rate of convolutions in that precision."""
        return replace(self, flops=self.rates.get(precision, self.flops))

    def kernel(self, moved: float, operations: float = 0.0, channels: int = 1) -> float:
        """Return the seconds of a kernel that moves so many bytes, if any; `channels`: of its output."""
        if not moved:
            return 0.0
        wasted = math.ceil(channels / self.lanes) * self.lanes / channels
        return self.launch + max(wasted * operations / self.flops, moved / self.memory_bandwidth)

    def node(self, cost: LayerCost) -> tuple[float, float]:
        """Return the seconds of a node, forward and backward."""
        operations, channels = FLOPS_PER_MULTIPLY_ADD * cost.multiply_adds, cost.shape[0]
        moved = cost.looks * (sum(cost.input_bytes) + cost.output_bytes)
        back = moved + cost.reread if cost.passes and moved else 0
        forward = self.kernel(moved, operations, channels)
        return forward, self.kernel(back, cost.passes * operations, channels)

    def taking_turns(self, ranks: int) -> float:
        """Return the threads a core where `ranks` have more of them than cores, else 1."""
        return 1.0 if self.cores is None else max(1.0, min(ranks, self.ranks_per_host) * self.threads / self.cores)

    def has_free_core(self, ranks: int) -> bool:
        """Return True if something can read and send while `ranks` compute: a core, or a device's whole host."""
        return self.cores is None or ranks * self.threads < self.cores

    def message_seconds(self, sizes: Sequence[int], ranks: int = 1) -> float:
        """Return the seconds of messages of these bytes of one of `ranks` ranks, one after the other; computing hides
        none."""
        latency, bandwidth, sharing = self._link(ranks)
        return len(sizes) * latency + sharing * sum(sizes) / bandwidth

    def all_reduce_seconds(self, calls: int, size: int, ranks: int) -> float:
        """Return the seconds of `calls` all-reduces of `size` bytes. Each byte leaves a rank 2 (n - 1) / n times, in 2
        log2 n rounds, the optimum of both terms (Thakur, Rabenseifner and Gropp, 2005). One rank of a host sends at a
        time to another one."""
        latency, bandwidth, _ = self._link(ranks)
        return 2 * (calls * math.ceil(math.log2(ranks)) * latency + (ranks - 1) / ranks * size / bandwidth)

    def _link(self, ranks: int) -> tuple[float, float, int]:
        """Return latency and bandwidth of the slowest link among so many ranks, and the ranks that share it."""
        if ranks > self.ranks_per_host and self.network is not None:
            return *self.network, self.ranks_per_host
        return self.latency, self.bandwidth, 1


ASSUMED = Machine(memory_bandwidth=600e9)
"""The speed by which the memory plan prices recomputing where no machine is known. Only its ratios matter."""


STAYING = 3  # offloaded tensors on their way out or in at once, each as large as the largest one
LEAST = 1 << 20  # bytes of the smallest tensor that is offloaded: calls for smaller ones would cost too much
WAITED = (
    0.35  # a step waits for this share of a copy's seconds: about the most measured (benchmarks/large_model_support)
)


@dataclass(frozen=True)
class Store:
    """A store of tensors. `written`, `read`: bytes a second of a rank beside its host's others. `machine`: the
    rank's speed."""

    written: float
    read: float
    machine: Machine

    def waited(self, written: float, read: float) -> float:
        """Return the seconds by which a step is longer for so many bytes each way."""
        return WAITED * (written / self.written + read / self.read)


ASSUMED_STORE = Store(2e9, 5e9, ASSUMED)  # a local NVMe disk as nodes of clusters have it


def disk_of(machine: Machine) -> Store | None:
    """Return a rank's share of its host's disk; None where it is not known."""
    if machine.disk is None:
        return None
    written, read = (rate / machine.ranks_per_host for rate in machine.disk)
    return Store(written, read, machine)


def store_of(machine: Machine) -> Store | None:
    """Return the store of a rank's tensors: the disk where ranks compute on cores, else the memory of their host. Each
    device has its own way to that memory. Return None where the store is not known."""
    if not machine.has_devices:
        return disk_of(machine)
    return machine.host_store and Store(*machine.host_store, machine)


BUCKET_BYTES = 8 << 20  # of an all-reduce: `gradients.BUCKET_BYTES`
_GRADIENT, _UPDATE = 20, 76  # bytes a weight: its gradient added to a float64 sum, and a step of AdamW


class StepTime(NamedTuple):
    """The seconds of a step on the rank that takes longest.

    `forward`, `backward`: of layers and the loss. `reading`: rasters, and preparing them for the network. `update`:
    adding up gradients of tiles, and the optimizer. `again`: computing once more, and waiting for a store, where memory
    is short. `messages`: halos, their copies, and statistics of norms. `all_reduce`: of gradients, the part that no
    computing hides. `waiting`: of a pipeline's ranks, for each other.
    """

    forward: float = 0.0
    backward: float = 0.0
    reading: float = 0.0
    update: float = 0.0
    again: float = 0.0
    messages: float = 0.0
    all_reduce: float = 0.0
    waiting: float = 0.0

    def times(self, factor: float) -> StepTime:
        return StepTime(*[factor * part for part in self])


def sum_of(times: Iterable[StepTime]) -> StepTime:
    """Add up times, one after the other."""
    return StepTime(*map(sum, zip(StepTime(), *times, strict=True)))


@dataclass(frozen=True)
class Prices:
    """Seconds of parts of a step: of a network with `bands`, in values of `width` bytes, on one of `ranks` ranks."""

    graph: Graph
    bands: int
    width: int
    machine: Machine
    ranks: int = 1

    @cached_property
    def weights(self) -> list[int]:
        """The number of each node's trained weights."""
        graph, channels = self.graph, tensor_channels(self.graph, self.bands)
        sources = [channels[first] for first, *_ in graph.sources]
        return [0 if n.frozen else n.layer.counts(c).weights for n, c in zip(graph.nodes, sources, strict=True)]

    def nodes(self, context: tuple[int, int]) -> list[tuple[float, float]]:
        """Return the seconds of each node, forward and backward, in a training step on a context of (height, width).
        Summing the gradients of its weights counts for a node, reading for the first node, the loss for the last."""
        costs, pixels = tile_walk(self.graph, self.bands, context, self.width).costs, context[0] * context[1]
        nodes = [self.machine.node(cost) for cost in costs]
        nodes = [(f, b + self._weights(_GRADIENT, [n])) for (f, b), n in zip(nodes, self.weights, strict=True)]
        reading, ahead, back = self._ends(pixels, pixels)
        nodes[0] = nodes[0][0] + reading, nodes[0][1]
        nodes[-1] = nodes[-1][0] + ahead, nodes[-1][1] + back
        return nodes

    def tile(self, context: tuple[int, int], owned: int) -> StepTime:
        """Price a training step's work on one context of shape (height, width)."""
        return self.walked(tile_walk(self.graph, self.bands, context, self.width), owned)

    def walked(self, walk: ForwardWalk, owned: int | None = None) -> StepTime:
        """Price a training step's work on a tile that owns so many pixels, or on a rank's block, which owns all that it
        gives; and the messages of its exchanges."""
        height, width = walk.made[0].size
        given = math.prod(walk.made[len(walk.graph)].size)
        reading, *loss = self._ends(height * width, given if owned is None else owned)
        nodes = [self.machine.node(cost) for cost in walk.costs]
        forward, backward = map(sum, zip(*nodes, loss, strict=True))
        messages = self.machine.message_seconds(walk.sent + walk.returned, self.ranks)
        return StepTime(forward, backward, reading, self._weights(_GRADIENT, self.weights), messages=messages)

    def _ends(self, pixels: int, owned: int) -> tuple[float, float, float]:
        """Return the seconds of reading and preparing the input of a context, then those of the loss over its owned
        pixels, forward and backward. Reading takes none where a free core does it meanwhile."""
        machine, values = self.machine, self.bands * pixels
        size = self.width * tensor_channels(self.graph, self.bands)[-1]
        entering = machine.kernel(2 * values * wide_bytes(self.width))
        entering += 0.0 if machine.has_free_core(self.ranks) else machine.reading * values
        crop = machine.kernel(3 * size * pixels) if owned < pixels else 0.0
        return entering, machine.kernel(6 * size * owned), machine.kernel(4 * size * owned) + crop

    def _weights(self, moved: int, weights: Sequence[int]) -> float:
        """Return the seconds of a pass over the weights of nodes, two tensors each; `moved`: bytes a weight."""
        launches = 2 * sum(map(bool, weights)) * self.machine.launch
        return launches + moved * sum(weights) / self.machine.memory_bandwidth

    def step(self, image: StepTime, images: int, backward: float) -> StepTime:
        """Price a step of `images` a rank, one after the other, with its optimizer and its all-reduce. `backward`:
        seconds of the last backward pass, which hides the all-reduce of all buckets but the last one."""
        size, machine = DOUBLE_BYTES * sum(self.weights), self.machine
        whole, buckets, hidden = machine.all_reduce_seconds(1, size, self.ranks), ceil(size / BUCKET_BYTES), 0.0
        if machine.known and buckets and machine.has_free_core(self.ranks):
            hidden = min(whole * (buckets - 1) / buckets, backward)
        time, update = image.times(images), self._weights(_UPDATE, self.weights)
        return time._replace(update=time.update + update, all_reduce=whole - hidden)

    def seconds(self, step: StepTime) -> float:
        """Return the seconds of a step by the clock. Ranks that share cores take turns in computing, but not in
        messages, all-reduces and waiting."""
        together = step.messages + step.all_reduce + step.waiting
        return self.machine.taking_turns(self.ranks) * (sum(step) - together) + together
