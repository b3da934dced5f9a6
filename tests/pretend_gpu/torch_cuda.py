"""torch.cuda over the pretend device, and the report of a process that the harness reads (`harness.py`)."""

from __future__ import annotations

import atexit
import collections
import json
import os
import time
from pathlib import Path
from typing import Any

from tests.pretend_gpu.device import COUNT, gpu, native, torch  # before torch

_PROCESS, _exit, _accelerator = os.getpid(), os._exit, torch.accelerator
_exchange = torch._C._accelerator_exchangeDevice
_RANK = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
# PRETEND_GPU_ALONE: a launcher shows each rank one GPU, another one, as its first.
_SEEN_AS = _RANK if "PRETEND_GPU_ALONE" in os.environ else "shared"


def write_report() -> None:
    """Write what the process did on its GPUs."""
    if (folder := os.environ.get("PRETEND_GPU_REPORTS")) and os.getpid() == _PROCESS:
        waits = [[kind, where, count] for (kind, where), count in gpu.waits.most_common()]
        report = {"races": sorted(set(gpu.races)), "waits": waits, "contexts": dict(sorted(gpu.contexts.items()))}
        report["launches"] = sum(clock.get(stream, 0) for stream, clock in gpu.clocks.items())
        Path(folder, f"{_RANK}-{_PROCESS}.json").write_text(json.dumps(report))


def _end() -> None:
    """Leave the interpreter to torch's backward threads for a moment: one that frees the objects of its last pass while
    the interpreter shuts down aborts the process (Python 3.11)."""
    write_report()
    time.sleep(0.1 if gpu.contexts else 0)
    native.disconnect()


os._exit = lambda code: (write_report(), _exit(code))  # type: ignore[assignment, func-returns-value]
atexit.register(_end)


def _index(given: Any = None) -> int:
    index = given if given is None or isinstance(given, int) else torch.device(given).index
    return _accelerator.current_device_index() if index is None or index < 0 else index


def set_device(given: Any) -> None:
    """Make a device current as CUDA 12's runtime does: its context is made at once."""
    gpu.take_context(_index(given))
    _accelerator.set_device_index(_index(given))


def set_stream(stream: torch.Stream) -> None:
    """Make a stream current, and its device, as torch.cuda does."""
    if _accelerator.current_device_index() != stream.device_index:
        set_device(stream.device_index)
    _accelerator.set_stream(stream)


def _allocated(given: Any = None) -> int:
    gpu.answer("is_pinned", 0)  # what was freed before is counted
    return gpu.allocated[_index(given)]


Properties = collections.namedtuple("Properties", "uuid total_memory name major minor multi_processor_count")
TOTAL, NAME = 8 << 30, "pretend GPU"
# Each a function of its own, since torch.compile knows them by what they are.
FUNCTIONS: dict[str, Any] = {
    **{name: lambda *_: None for name in ("_lazy_init", "_sleep", "empty_cache", "manual_seed", "manual_seed_all")},
    **{name: lambda *_: True for name in ("is_available", "is_bf16_supported", "is_initialized")},
    **{name: lambda at: _exchange(at) for name in ("_exchange_device", "_maybe_exchange_device")},
    **{name: lambda given=None: _allocated(given) for name in ("memory_allocated", "memory_reserved")},
    "Event": lambda enable_timing=False: torch.Event("cuda", enable_timing=enable_timing),
    "Stream": lambda given=None: torch.Stream(torch.device("cuda", _index(given))),
    "current_device": lambda: _index(),
    "current_stream": lambda given=None: _accelerator.current_stream(_index(given)),
    "device_count": lambda: COUNT,
    "get_device_capability": lambda given=None: (9, 0),
    "get_device_name": lambda given=None: NAME,
    "get_device_properties": lambda given=None: Properties(
        f"pretend-{_SEEN_AS}-{_index(given)}", TOTAL, NAME, 9, 0, 132
    ),
    "get_rng_state": lambda given="cuda": torch.empty(0, dtype=torch.uint8),
    "max_memory_allocated": lambda given=None: gpu.peak[_index(given)],
    "mem_get_info": lambda given=None: (TOTAL - _allocated(given), TOTAL),
    "reset_peak_memory_stats": lambda given=None: gpu.peak.__setitem__(_index(given), _allocated(given)),
    "set_device": set_device,
    "set_rng_state": lambda state, given="cuda": None,
    "set_stream": set_stream,
    "synchronize": lambda given=None: gpu.answer("synchronize"),
}
for _name, _function in FUNCTIONS.items():
    assert hasattr(torch.cuda, _name), _name
    setattr(torch.cuda, _name, _function)
torch.cuda.nccl.version = lambda: (2, 27, 5)  # type: ignore[assignment, return-value]
torch._C._cuda_isCurrentStreamCapturing = lambda: False  # type: ignore[attr-defined]


def _clone_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()


torch.UntypedStorage.clone = _clone_storage  # type: ignore[method-assign]
