"""The pretend GPU: memory by stream, streams as vector clocks, and kernels, which run on the host at once (README.md).

A stream's clock counts its launches. An access (stream, count) comes before what a stream does now if the stream's
clock has reached that count: by an event, by a host wait, or in the stream itself. Any other pair of accesses to the
same bytes, one of them a write, is a race. The host has a clock too; each launch joins it to its stream's.

`device.cpp` asks the functions here by their names. Importing this loads it, and torch after it.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import ctypes
import importlib.util
import itertools
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

assert "torch" not in sys.modules, "the pretend GPU comes before torch, which looks for a GPU once"
_libraries = Path(importlib.util.find_spec("torch").origin).parent / "lib"  # type: ignore[union-attr, arg-type]
for _name in ("torch_global_deps", "c10", "torch_cpu", "torch", "torch_python"):
    ctypes.CDLL(str(_libraries / f"lib{_name}.so"), ctypes.RTLD_GLOBAL)
ctypes.CDLL(os.environ["PRETEND_GPU"], ctypes.RTLD_GLOBAL)

import torch  # noqa: E402

_spec = importlib.util.spec_from_file_location("pretend_device", os.environ["PRETEND_GPU"])
native: Any = importlib.util.module_from_spec(_spec)  # type: ignore[arg-type]
_spec.loader.exec_module(native)  # type: ignore[union-attr]

Clock = dict[int, int]
COUNT = int(os.environ.get("PRETEND_GPU_DEVICES", "1"))
TOTAL = 8 << 30
HOST = -1  # as a device: pinned memory's


class Access(NamedTuple):
    """What a launch does with bytes."""

    low: int
    high: int
    stream: int
    count: int
    writes: bool
    op: str

    def before(self, stream: int) -> bool:
        """Return True if what the stream does now comes after it."""
        return self.stream == stream or clocks[stream].get(self.stream, 0) >= self.count


@dataclass(eq=False)
class Block:
    """Memory of a device, or of the host and pinned."""

    memory: np.ndarray
    device: int
    stream: int
    recorded: set[int] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)


class Copy(NamedTuple):
    """A copy that the host has not waited for: `memory` is the host's, `held` what it reads or brings."""

    access: Access
    out: bool
    memory: np.ndarray
    held: np.ndarray


races: list[str] = []
waits: collections.Counter[tuple[str, str]] = collections.Counter()  # by kind and place
contexts: dict[int, str] = {}  # each device with the place that took it first
failures: dict[str, tuple[str, str]] = {}  # op (or `allocate`, `pin`): the error's class and words, once
query = os.environ.get("PRETEND_GPU_QUERY", "coin")  # what `Event.query` says: never, always, or by coin
coin = random.Random(1)
allocated, peak = [0] * COUNT, [0] * COUNT
clocks: collections.defaultdict[int, Clock] = collections.defaultdict(dict)  # by stream
host: Clock = {}
_lock = threading.RLock()
_freed: collections.deque[int] = collections.deque()
_blocks: dict[int, Block] = {}
_starts: list[int] = []
_pool: collections.defaultdict[tuple[int, int, int], list[int]] = collections.defaultdict(list)
copies: list[Copy] = []
_events: dict[int, tuple[Clock, float]] = {0: ({}, 0.0)}  # 0: never recorded
_numbers = itertools.count(1)
free = _freed.append  # at any point of any thread's code, this one's too: what follows is done later


def place() -> str:
    """Return the innermost lines of the program that are not torch's, and the test that runs."""
    others = ("/torch/", f"{Path(__file__).parent}/", "/pluggy", "_pytest", "<frozen", "/contextlib.py")
    root = str(Path(__file__).parents[2]) + "/"
    frames = [f for f in reversed(traceback.extract_stack()) if not any(part in f.filename for part in others)]
    lines = " < ".join(f"{f.filename.removeprefix(root)}:{f.lineno}" for f in frames[:4])
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    return f"{lines} [{test}]" if test else lines


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Keep other threads out, and do what follows from tensors that are gone by now."""
    with _lock:
        while _freed:
            start = _freed.popleft()
            block = _blocks[start]
            size = len(block.memory)
            if block.device == HOST:
                settle(copies_at(start, start + size))
                block.accesses = []
            else:
                allocated[block.device] -= size
                # torch's allocator waits for the recorded streams' work before it gives the memory out again.
                block.accesses = [each for each in block.accesses if each.stream not in block.recorded]
            _pool[block.device, block.stream, size].append(start)
        yield


# ---- clocks and copies
def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(count, clock.get(stream, 0))


def wait(kind: str, clock: Clock) -> None:
    """Have the host wait for a clock, and count it."""
    waits[kind, place()] += 1
    _reach(clock)


def _reach(clock: Clock) -> None:
    _join(host, clock)
    settle([copy for copy in copies if host.get(copy.access.stream, 0) >= copy.access.count])


def copies_at(low: int, high: int) -> list[Copy]:
    return [copy for copy in copies if copy.access.low < high and low < copy.access.high]


def settle(over: list[Copy]) -> None:
    """End copies: until then bytes on the host are 0xCD, or must stay as they are."""
    for copy in (each for each in over if each in copies):  # an object that goes meanwhile may have waited
        copies.remove(copy)
        if copy.out:
            copy.memory[:] = copy.held
        elif (copy.memory != copy.held).any():
            races.append(f"the host wrote pinned memory that a copy may still read: {copy.access.op} at {place()}")


def launch(device: int, stream: int) -> int:
    """Begin a launch, and return its count."""
    take_context(device)
    _join(clocks[stream], host)
    clocks[stream][stream] = clocks[stream].get(stream, 0) + 1
    return clocks[stream][stream]


def take_context(device: int) -> None:
    if device not in contexts:
        contexts[device] = f"{threading.current_thread().name}: {place()}"


# ---- memory
def allocate(size: int, pinned: bool, device: int, stream: int) -> int:
    """Return the address of bytes that are all 0xFF, as numbers NaN."""
    with locked():
        take_context(device)
        if not size and not pinned:
            return 0
        fail_if_told("pin" if pinned else "allocate")
        size = max(1, -(-size // 512)) * 512
        if pinned:
            device, stream = HOST, 0
        elif allocated[device] + size > TOTAL:
            sizes = f"Tried to allocate {size >> 20} MiB. GPU {device} has a total capacity of {TOTAL >> 20} MiB."
            raise torch.OutOfMemoryError(f"CUDA out of memory. {sizes}")
        if freed := _pool[device, stream, size]:
            start = freed.pop()
            _blocks[start].recorded.clear()
        else:
            memory = np.empty(size + 512, np.uint8)
            start = -(-memory.ctypes.data // 512) * 512
            memory = memory[start - memory.ctypes.data :][:size]
            _blocks[start] = Block(memory, device, stream)
            bisect.insort(_starts, start)
        if not pinned:
            allocated[device] += size
            peak[device] = max(peak[device], allocated[device])
        _blocks[start].memory[:] = 0xFF
        return start


def fail_if_told(op: str) -> None:
    if op in failures:
        kind, message = failures.pop(op)
        raise getattr(torch, kind, RuntimeError)(message)


def memory_at(low: int, high: int) -> tuple[Block, np.ndarray] | None:
    """Return the block with these bytes, and them."""
    start = _starts[bisect.bisect_right(_starts, low) - 1] if _starts else low + 1
    if not start <= low < start + len(_blocks[start].memory):
        return None
    return _blocks[start], _blocks[start].memory[low - start : high - start]


def is_pinned(address: int) -> bool:
    with locked():
        found = memory_at(address, address)
        return found is not None and found[0].device == HOST


def record_stream(address: int, stream: int) -> None:
    with locked():
        if found := memory_at(address, address):
            found[0].recorded.add(stream)


def note(access: Access) -> None:
    """Note an access, and each race with one before."""
    low, high, stream, _, writes, op = access
    found = memory_at(low, high) if low < high else None
    if found is None:
        return
    block, left = found[0], []
    for other in block.accesses:
        before = other.before(stream)
        if other.low < high and low < other.high and (other.writes or writes) and not before:
            words = ("reads", "writes")
            what = f"{op} {words[writes]} on stream {stream} what {other.op} {words[other.writes]} on {other.stream}"
            races.append(f"{what}{' (pinned)' if block.device == HOST else ''} at {place()}")
        replaced = before and low <= other.low and other.high <= high and (writes or not other.writes)
        left += [] if replaced else [other]
    block.accesses = [*left, access]


def note_outside(tensor: torch.Tensor, writes: bool, op: str) -> None:
    """Note an access of an operation outside torch, on the current stream."""
    index = tensor.device.index
    stream = native.stream_number(index)
    with locked():
        note(Access(*native.span_of(tensor), stream, launch(index, stream), writes, op))


# ---- events, each the clock of a stream at some moment
def record(event: int, stream: int) -> int:
    with locked():
        event = event or next(_numbers)
        _join(clocks[stream], host)
        _events[event] = dict(clocks[stream]), time.perf_counter()  # kernels run at once
        return event


def wait_event(event: int, stream: int) -> None:
    with locked():
        _join(clocks[stream], _events[event][0])


def query_event(event: int) -> bool:
    with locked():
        clock = _events[event][0]
        if any(host.get(stream, 0) < count for stream, count in clock.items()):
            if query == "never" or (query == "coin" and coin.random() < 0.5):
                return False
            _reach(clock)
        return True


def synchronize_event(event: int) -> None:
    with locked():
        wait("event", _events[event][0])


def synchronize() -> None:
    with locked():
        for clock in list(clocks.values()):
            _reach(clock)
        wait("device", {})


def elapsed_time(begin: int, end: int) -> float:
    return 1000 * (_events[end][1] - _events[begin][1])


assert native.connect(sys.modules[__name__], COUNT), "torch looked for a GPU before the pretend one was there"
