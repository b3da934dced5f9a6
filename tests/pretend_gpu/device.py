"""The pretend GPU: memory by stream, streams as vector clocks, and what kernels, which run at once, do with bytes.

A stream's clock counts its launches. An access (stream, count) comes before what a stream does now if the stream's
clock has reached that count: by an event, by a host wait, or in the stream itself. Any other pair of accesses to the
same bytes, one of them a write, is a race. The host has a clock too; each launch joins it to its stream's.
"""

import collections
import ctypes
import itertools
import os
import random
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pretend_device as native  # before torch, which looks for a GPU once
import torch

# torch's list in `use_deterministic_algorithms`, as far as it raises on CUDA; and what reads a number or a size back.
UNORDERED = """put_ cumsum histc kthvalue median.dim max_unpool2d nll_loss2d_forward nll_loss2d_backward
upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward reflection_pad1d_backward
reflection_pad2d_backward _adaptive_avg_pool2d_backward adaptive_max_pool2d_backward avg_pool3d_backward
max_pool3d_with_indices_backward grid_sampler_2d_backward fractional_max_pool2d_backward"""
WAITING = """_local_scalar_dense bincount equal is_nonzero masked_select nonzero _unique2 unique_dim unique_consecutive
repeat_interleave.Tensor"""
COUNT = int(os.environ["PRETEND_GPU_DEVICES"])
HOST = -1  # as a device: pinned memory's; as a stream: the host
Clock = collections.Counter[int]  # launches by stream
Access = collections.namedtuple("Access", "low high stream count writes op")  # what a launch does with bytes


@dataclass(eq=False)
class Block:
    """Memory of a device, or of the host and pinned."""

    memory: Any
    key: tuple[int, int, int]  # device, stream, size
    recorded: set[int] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)


class Gpu:
    """All GPUs of this process."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.waits: collections.Counter[tuple[str, str]] = collections.Counter()  # by kind and place
        self.contexts: dict[int, str] = {}  # each device with the place that took it first
        self.failures: dict[str, tuple[str, str]] = {}  # op: the error's class and words, once
        self.query, self.coin = 0.5, random.Random(1)  # how often `Event.query` says that what is not over is over
        self.allocated, self.peak = [0] * COUNT, [0] * COUNT
        self.clocks = collections.defaultdict[int, Clock](collections.Counter)  # by stream, and the host's
        self.copies: dict[Access, bytes] = {}  # which the host has not waited for, with what they bring there or read
        self._lock = threading.RLock()
        self._freed: collections.deque[int] = collections.deque()
        self._blocks: dict[int, Block] = {}  # by their first bytes
        self._pool = collections.defaultdict[tuple[int, int, int], list[int]](list)
        self._events = {0: (Clock(), 0.0)}  # a stream's clock; 0: never recorded
        self._numbers = itertools.count(1)

    def answer(self, function: str, *given: Any) -> Any:
        """Call a function below, alone, and after what follows from tensors that are gone by now."""
        if function == "free":  # at any point of any thread's code, this one's too
            return self._freed.append(given[0])
        with self._lock:
            while self._freed:
                self._free(self._freed.popleft())
            return getattr(self, function)(*given)

    @staticmethod
    def _place() -> str:
        """Return the innermost lines of the program that are not torch's."""
        others = ("/torch/", f"{Path(__file__).parent}/", "/pluggy", "_pytest", "<frozen", "/contextlib.py")
        frames = [f for f in reversed(traceback.extract_stack()) if not any(part in f.filename for part in others)]
        return " < ".join(f"{'/'.join(Path(f.filename).parts[-3:])}:{f.lineno}" for f in frames[:4])

    def _wait(self, kind: str, clock: Clock) -> None:
        """Have the host wait for a clock, and count it."""
        self.waits[kind, self._place()] += 1
        self._reach(clock)

    def _reach(self, clock: Clock) -> None:
        self.clocks[HOST] |= clock
        self._settle([copy for copy in self.copies if self._is_before(copy, HOST)])

    def _is_before(self, access: Access, stream: int) -> bool:
        """Return True if what the stream does now comes after the access."""
        return access.stream == stream or self.clocks[stream][access.stream] >= access.count

    def _settle(self, over: Sequence[Access]) -> None:
        """End copies: until then bytes on the host are 0xCD, or must stay as they are."""
        for copy in over:
            held = self.copies.pop(copy, None)  # an object that goes meanwhile may have waited
            if held is not None and copy.writes:
                ctypes.memmove(copy.low, held, len(held))
            elif held is not None and ctypes.string_at(copy.low, len(held)) != held:
                what = f"the host wrote pinned memory that a copy may still read: {copy.op}"
                self.races.append(f"{what} at {self._place()}")

    def _launch(self, device: int) -> tuple[int, int]:
        """Begin a launch on the device's current stream; return the stream, and its count."""
        stream = native.stream_number(device)
        self.take_context(device)
        self.clocks[stream] |= self.clocks[HOST]
        self.clocks[stream][stream] += 1
        return stream, self.clocks[stream][stream]

    def take_context(self, device: int) -> None:
        if device not in self.contexts:
            self.contexts[device] = f"{threading.current_thread().name}: {self._place()}"

    def allocate(self, size: int, pinned: bool, device: int, stream: int) -> int:
        """Return the address of bytes that are all 0xFF, as numbers NaN."""
        self.take_context(device)
        if not size and not pinned:
            return 0
        size = max(1, -(-size // 512)) * 512
        key = (HOST, 0, size) if pinned else (device, stream, size)
        if not self._pool[key]:
            memory = ctypes.create_string_buffer(size)
            self._pool[key].append(ctypes.addressof(memory))
            self._blocks[ctypes.addressof(memory)] = Block(memory, key)
        start = self._pool[key].pop()
        self._blocks[start].recorded.clear()
        ctypes.memset(start, 0xFF, size)
        if not pinned:
            self.allocated[device] += size
            self.peak[device] = max(self.peak[device], self.allocated[device])
        return start

    def _free(self, start: int) -> None:
        block, (device, _, size) = self._blocks[start], self._blocks[start].key
        self._pool[block.key].append(start)
        if device == HOST:
            self._settle([copy for copy in self.copies if start <= copy.low < start + size])
            block.accesses = []
        else:
            self.allocated[device] -= size
            # torch's allocator waits for the recorded streams' work before it gives the memory out again.
            block.accesses = [each for each in block.accesses if each.stream not in block.recorded]

    def is_pinned(self, start: int) -> bool:
        return start in self._blocks and self._blocks[start].key[0] == HOST

    def record_stream(self, start: int, stream: int) -> None:
        self._blocks[start].recorded.add(stream)

    @staticmethod
    def _access(tensor: torch.Tensor, *launch: Any) -> Access:
        """Return an access from a tensor's first byte to its last."""
        low = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.itemsize
        steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return Access(low, low + (1 + sum(steps)) * tensor.itemsize * bool(tensor.numel()), *launch)

    def _note(self, tensor: torch.Tensor, stream: int, count: int, writes: bool, op: str) -> None:
        """Note an access, and each race with one before."""
        access = self._access(tensor, stream, count, writes, op)
        block = self._blocks.get(tensor.untyped_storage().data_ptr())
        left = list[Access]()
        for other in block.accesses if block else ():
            before = self._is_before(other, stream)
            if other.low < access.high and access.low < other.high and (other.writes or writes) and not before:
                does, did = ("writes" if each else "reads" for each in (writes, other.writes))
                what = f"{op} {does} on stream {stream} what {other.op} {did} on {other.stream}"
                self.races.append(f"{what} at {self._place()}")
            replaced = before and access.low <= other.low and other.high <= access.high and (writes or not other.writes)
            left += [] if replaced else [other]
        if block:
            block.accesses = [*left, access]

    def note_outside(self, tensor: torch.Tensor, writes: bool, op: str) -> None:
        """Note an access of an operation outside torch, on the current stream."""
        self._note(tensor, *self._launch(tensor.device.index), writes, op)

    def begin(self, op: str, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Look at the arguments of an operation that the CPU's kernel is to run: mixed devices, waits, planned
        failures. Return True if a GPU's kernel adds in no order."""
        name, given = op.removeprefix("aten::"), [each for each in tensors if each is not None]
        puts = name.startswith(("index_put", "_index_put"))
        index = given[1:-1] if puts else given[1:] if name.startswith("index.") else []
        kinds = [f"{op} by a mask" for each in index if each.dtype in (torch.bool, torch.uint8)]
        kinds += [f"{op} by the host's indices" for each in index if not each.is_cuda]
        names = {name, name.partition(".")[0]}
        kinds += [name.replace("_local_scalar_dense", "item")] if names & {*WAITING.split()} else []
        there = [each for each in given if each.is_cuda or (each.dim() and not any(each is k for k in index))]
        places = {str(each.device) for each in there}
        if len(places) > 1:
            words = "Expected all tensors to be on the same device, but found at least two devices"
            raise RuntimeError(f"{words}, {' and '.join(sorted(places))}! ({op})")
        if op in self.failures:
            kind, message = self.failures.pop(op)
            raise getattr(torch, kind, RuntimeError)(message)
        for kind in kinds:
            self._wait(kind, self.clocks[self._launch(next(each.device.index for each in given if each.is_cuda))[0]])
        return bool(names & {*UNORDERED.split()})

    def copy(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool, running: str) -> None:
        """Copy at once, or, out to pinned memory without blocking, once the host has waited. `running`: the operation
        whose arguments or results these are."""
        out, within = not to.is_cuda, to.is_cuda and source.is_cuda
        op = running or f"copy{'' if within else ' out' if out else ' in'}{', non-blocking' if non_blocking else ''}"
        stream, count = self._launch((source if out else to).device.index)
        host = to if out else source
        pinned = not within and not running and self.is_pinned(host.untyped_storage().data_ptr())
        for tensor, writes in ((source, False), (to, True)):
            if tensor.is_cuda or pinned:
                self._note(tensor, stream, count, writes, op)
        access = self._access(host, stream, count, out, op)
        if pinned:  # it reads what a copy out has brought, or writes what an earlier copy of its stream has read
            over = [copy for copy in self.copies if copy.low < access.high and access.low < copy.high]
            self._settle([copy for copy in over if (self._is_before(copy, stream) if out else copy.writes)])
        (native.on_host(to) if to.is_cuda else to).copy_(native.on_host(source) if source.is_cuda else source)
        if pinned and non_blocking:
            self.copies[access] = ctypes.string_at(access.low, access.high - access.low)
            if out:
                ctypes.memset(access.low, 0xCD, access.high - access.low)
        elif not within and not running:
            self._wait(f"{op}, {'pinned' if pinned else 'pageable'}", self.clocks[stream])

    def record(self, event: int, stream: int) -> int:
        event = event or next(self._numbers)
        self.clocks[stream] |= self.clocks[HOST]
        self._events[event] = self.clocks[stream].copy(), time.perf_counter()  # kernels run at once
        return event

    def wait_event(self, event: int, stream: int) -> None:
        self.clocks[stream] |= self._events[event][0]

    def query_event(self, event: int) -> bool:
        clock = self._events[event][0]
        is_over = clock <= self.clocks[HOST] or self.coin.random() < self.query
        self._reach(clock if is_over else Clock())
        return is_over

    def synchronize_event(self, event: int) -> None:
        self._wait("event", self._events[event][0])

    def synchronize(self) -> None:
        for clock in list(self.clocks.values()):
            self._reach(clock)
        self._wait("device", Clock())

    def elapsed_time(self, begin: int, end: int) -> float:
        return 1000 * (self._events[end][1] - self._events[begin][1])


gpu = Gpu()
assert native.connect(gpu.answer, COUNT), "torch looked for a GPU before the pretend one was there"
