"""torch.cuda over the pretend device, and the report of a process that the harness reads (`harness.py`)."""

from __future__ import annotations

import atexit
import collections
import json
import os
import time
from pathlib import Path
from typing import Any

from tests.pretend_gpu import device, kernels  # noqa: F401  (before torch)
from tests.pretend_gpu.device import torch

_PROCESS, _exit = os.getpid(), os._exit
# PRETEND_GPU_ALONE: a launcher shows each rank one GPU, another one, as its first.
_RANK = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
_SEEN_AS = _RANK if "PRETEND_GPU_ALONE" in os.environ else "shared"


def write_report() -> None:
    """Write what the process did on its GPUs."""
    folder = os.environ.get("PRETEND_GPU_REPORTS")
    if folder and os.getpid() == _PROCESS:
        report = {
            "races": sorted(set(device.races)),
            "waits": [[kind, where, count] for (kind, where), count in device.waits.most_common()],
            "contexts": dict(sorted(device.contexts.items())),
            "launches": sum(clock.get(stream, 0) for stream, clock in device.clocks.items()),
        }
        Path(folder, f"{_RANK}-{_PROCESS}.json").write_text(json.dumps(report))


def _report_and_exit(code: int) -> None:
    write_report()
    _exit(code)


def _end() -> None:
    """Leave the interpreter to torch's backward threads for a moment: one that frees the objects of its last pass while
    the interpreter shuts down aborts the process (Python 3.11)."""
    write_report()
    time.sleep(0.1 if device.contexts else 0)
    device.native.disconnect()


os._exit = _report_and_exit  # type: ignore[assignment]
atexit.register(_end)


def _index(given: Any = None) -> int:
    index = given if given is None or isinstance(given, int) else torch.device(given).index
    return device.native.current_device() if index is None or index < 0 else index


def set_device(given: Any) -> None:
    """Make a device current as CUDA 12's runtime does: its context is made at once."""
    device.take_context(_index(given))
    device.native.exchange_device(_index(given))


def new_stream(given: Any = None, priority: int = 0, **made: int) -> torch.Stream:
    where = made or {"device": torch.device("cuda", _index(given))}
    return torch.Stream(priority=priority, **where)  # type: ignore[arg-type]


def new_event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    return torch.Event(device=torch.device("cuda", _index()), enable_timing=enable_timing)


def current_stream(given: Any = None) -> torch.Stream:
    stream = device.native.current_stream(_index(given))
    return new_stream(stream_id=stream, device_index=_index(given), device_type=1)


def set_stream(stream: torch.Stream) -> None:
    """Make a stream current, and its device, as torch.cuda does."""
    if device.native.current_device() != stream.device_index:
        set_device(stream.device_index)
    device.native.set_stream(stream.device_index, stream.stream_id)


def _allocated(given: Any = None) -> int:
    device.is_pinned(0)  # what was freed before is counted
    return device.allocated[_index(given)]


Properties = collections.namedtuple("Properties", "uuid total_memory name major minor multi_processor_count")
FUNCTIONS = {
    "Event": new_event,
    "Stream": new_stream,
    "_exchange_device": device.native.exchange_device,
    "_lazy_init": lambda: None,
    "_maybe_exchange_device": device.native.exchange_device,
    "_sleep": lambda cycles: None,
    "current_device": device.native.current_device,
    "current_stream": current_stream,
    "default_generators": tuple(torch.Generator() for _ in range(device.COUNT)),
    "default_stream": lambda given=None: new_stream(stream_id=0, device_index=_index(given), device_type=1),
    "device_count": lambda: device.COUNT,
    "empty_cache": lambda: None,
    "get_device_capability": lambda given=None: (9, 0),
    "get_device_name": lambda given=None: "pretend GPU",
    "get_device_properties": lambda given=None: Properties(
        f"pretend-{_SEEN_AS}-{_index(given)}", device.TOTAL, "pretend GPU", 9, 0, 132
    ),
    "get_rng_state": lambda given="cuda": torch.empty(0, dtype=torch.uint8),
    "is_available": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_initialized": lambda: True,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "max_memory_allocated": lambda given=None: device.peak[_index(given)],
    "max_memory_reserved": lambda given=None: device.peak[_index(given)],
    "mem_get_info": lambda given=None: (device.TOTAL - _allocated(given), device.TOTAL),
    "memory_allocated": _allocated,
    "memory_reserved": _allocated,
    "reset_peak_memory_stats": lambda given=None: device.peak.__setitem__(_index(given), _allocated(given)),
    "set_device": set_device,
    "set_rng_state": lambda state, given="cuda": None,
    "set_stream": set_stream,
    "synchronize": lambda given=None: device.synchronize(),
}
for _name, _function in FUNCTIONS.items():
    assert hasattr(torch.cuda, _name), _name
    setattr(torch.cuda, _name, _function)
torch.cuda.nccl.version = lambda: (2, 27, 5)  # type: ignore[assignment, return-value]
torch._C._cuda_isCurrentStreamCapturing = lambda: False  # type: ignore[attr-defined]
_clone = torch.UntypedStorage.clone


def _clone_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _clone(storage)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()


torch.UntypedStorage.clone = _clone_storage  # type: ignore[method-assign]
