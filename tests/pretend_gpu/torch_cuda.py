"""torch.cuda over the pretend device. Importing it loads the device and torch; torch must not have been loaded before.

`races` has a line for each race, `waits` counts the host's waits by kind and place. Both stand in the process's report
too, which the harness reads (`tests/pretend_gpu/harness.py`).
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import importlib.util
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

assert "torch" not in sys.modules, "the pretend GPU comes before torch, which looks for a GPU once"
BUILT = os.environ["PRETEND_GPU"]
_libraries = Path(importlib.util.find_spec("torch").origin).parent / "lib"  # type: ignore[union-attr, arg-type]
for _name in ("torch_global_deps", "c10", "torch_cpu", "torch", "torch_python"):
    ctypes.CDLL(str(_libraries / f"lib{_name}.so"), ctypes.RTLD_GLOBAL)
ctypes.CDLL(BUILT, ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import torch.cuda  # noqa: E402

_spec = importlib.util.spec_from_file_location("pretend_device", BUILT)
device: Any = importlib.util.module_from_spec(_spec)  # type: ignore[arg-type]
_spec.loader.exec_module(device)  # type: ignore[union-attr]
assert device.has_cuda(), "torch looked for a GPU before the pretend one was there"

DEVICES = int(os.environ.get("PRETEND_GPU_DEVICES", "1"))
device.set_devices(DEVICES)
device.set_query(os.environ.get("PRETEND_GPU_QUERY", "coin"))
# torch's list in `use_deterministic_algorithms`, as far as it raises on CUDA.
device.set_nondeterministic(
    {
        f"aten::{name}"
        for name in ("put_", "cumsum", "histc", "kthvalue", "median.dim", "max_unpool2d", "grid_sampler_2d_backward")
    }
    | {f"aten::{name}2d_backward" for name in ("upsample_bilinear", "upsample_bicubic", "reflection_pad")}
    | {f"aten::{name}1d_backward" for name in ("upsample_linear", "reflection_pad")}
    | {
        f"aten::{name}_backward"
        for name in ("_adaptive_avg_pool2d", "adaptive_max_pool2d", "fractional_max_pool2d", "avg_pool3d")
    }
    | {f"aten::{name}" for name in ("nll_loss2d_forward", "nll_loss2d_backward", "max_pool3d_with_indices_backward")}
)

races: list[str] = []
waits: collections.Counter[tuple[str, str]] = collections.Counter()
contexts: dict[int, str] = {}  # each device with the place that took it first


def place() -> str:
    """Return the innermost lines of the program that are not torch's, and the test that runs."""
    mine = ("/torch/", __file__, "/pluggy", "_pytest", "<frozen", "/contextlib.py")
    root = str(Path(__file__).parents[2]) + "/"
    frames = [f for f in reversed(traceback.extract_stack()) if not any(part in f.filename for part in mine)]
    lines = " < ".join(f"{f.filename.removeprefix(root)}:{f.lineno}" for f in frames[:4])
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    return f"{lines} [{test}]" if test else lines


def _listen(message: str) -> None:
    kind, text = message.split(": ", 1)
    if kind == "race":
        races.append(f"{text} at {place()}")
    else:
        waits[text, place()] += 1


device.listen(_listen)


def reset() -> None:
    """Forget races and waits."""
    races.clear()
    waits.clear()


def report() -> dict[str, Any]:
    """Return what the process did on its GPUs, as JSON's values."""
    return {
        "races": sorted(set(races)),
        "waits": [[kind, where, count] for (kind, where), count in waits.most_common()],
        "contexts": {index: contexts.get(index, "") for index in sorted(device.contexts())},
        "launches": sum(device.launches().values()),
    }


def _write_report() -> None:
    folder = os.environ.get("PRETEND_GPU_REPORTS")
    if folder and os.getpid() == _PROCESS:
        rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
        Path(folder, f"{rank}-{_PROCESS}.json").write_text(json.dumps(report()))


_PROCESS = os.getpid()
_exit = os._exit


def _report_and_exit(code: int) -> None:
    _write_report()
    _exit(code)


def _write_and_wait() -> None:
    """Write the report, and leave the interpreter to torch's backward threads for a moment.

    One that frees the objects of its last pass while the interpreter shuts down aborts the process (Python 3.11).
    """
    _write_report()
    if device.contexts():
        time.sleep(0.1)


os._exit = _report_and_exit  # type: ignore[assignment]
atexit.register(_write_and_wait)


# ---- torch.cuda
def _index(given: Any = None) -> int:
    if given is None or (isinstance(given, int) and given < 0):
        return device.current_device()
    found = given if isinstance(given, int) else torch.device(given).index
    return device.current_device() if found is None else found


def _take(index: int) -> None:
    """Make a device current as CUDA 12's runtime does: its context is made at once."""
    contexts.setdefault(index, f"{threading.current_thread().name}: {place()}")
    device.make_context(index)
    device.set_device(index)


class Stream(torch.Stream):
    """A stream with the methods of torch.cuda's."""

    def __new__(cls, given: Any = None, priority: int = 0, **made: int) -> Stream:
        if "stream_id" in made:
            return super().__new__(cls, device_type=1, **made)
        return super().__new__(cls, device=torch.device("cuda", _index(made.get("device", given))), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event(torch.Event):
    """An event with the methods of torch.cuda's."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, device=torch.device("cuda", _index()), enable_timing=enable_timing)

    def record(self, stream: Stream | None = None) -> None:
        super().record(stream or current_stream())
        self.moment = time.perf_counter()  # kernels run at once

    def wait(self, stream: Stream | None = None) -> None:
        super().wait(stream or current_stream())

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.moment - self.moment)


def current_stream(given: Any = None) -> Stream:
    index = _index(given)
    return Stream(stream_id=device.current_stream(index), device_index=index)


def set_stream(stream: Stream) -> None:
    """Make a stream current, and its device, as torch.cuda does."""
    if device.current_device() != stream.device_index:
        _take(stream.device_index)
    device.set_stream(stream.device_index, stream.stream_id)


@contextlib.contextmanager
def use_stream(stream: Stream | None) -> Iterator[Stream | None]:
    """Do what torch.cuda.stream does: at the end the streams of both devices and the device are as before."""
    if stream is None:
        yield None
        return
    before, on_its_device = current_stream(), current_stream(stream.device)
    set_stream(stream)
    try:
        yield stream
    finally:
        if before.device != stream.device:
            set_stream(on_its_device)
        set_stream(before)


def _exchange_device(index: int) -> int:
    before = device.current_device()
    if index >= 0:
        device.set_device(index)
    return before if index >= 0 else -1


Properties = collections.namedtuple("Properties", "uuid total_memory name major minor multi_processor_count")


def _properties(given: Any = None) -> Properties:
    # PRETEND_GPU_ALONE: a launcher shows each rank one GPU, another one, as its first.
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0") if "PRETEND_GPU_ALONE" in os.environ else "shared"
    uuid = f"pretend-{rank}-{_index(given)}"
    return Properties(uuid, device.memory(0)[3], "pretend GPU", 9, 0, 132)


def _memory(which: int) -> Any:
    return lambda given=None: device.memory(_index(given))[which]


def _replace(module: Any, **functions: Any) -> None:
    for name, function in functions.items():
        assert hasattr(module, name), name
        setattr(module, name, function)


_replace(
    torch.cuda,
    Event=Event,
    Stream=Stream,
    _exchange_device=_exchange_device,
    _lazy_init=lambda: None,
    _maybe_exchange_device=_exchange_device,
    _sleep=lambda cycles: None,
    current_device=device.current_device,
    current_stream=current_stream,
    default_generators=tuple(torch.Generator() for _ in range(DEVICES)),
    default_stream=lambda given=None: Stream(stream_id=0, device_index=_index(given)),
    device_count=lambda: DEVICES,
    empty_cache=lambda: None,
    get_device_capability=lambda given=None: (9, 0),
    get_device_name=lambda given=None: "pretend GPU",
    get_device_properties=_properties,
    get_rng_state=lambda given="cuda": torch.empty(0, dtype=torch.uint8),
    is_available=lambda: True,
    is_bf16_supported=lambda including_emulation=True: True,
    is_initialized=lambda: True,
    manual_seed=lambda seed: None,
    manual_seed_all=lambda seed: None,
    max_memory_allocated=_memory(1),
    max_memory_reserved=_memory(2),
    mem_get_info=lambda given=None: (
        device.memory(_index(given))[3] - device.memory(_index(given))[0],
        device.memory(0)[3],
    ),
    memory_allocated=_memory(0),
    memory_reserved=_memory(2),
    reset_peak_memory_stats=lambda given=None: device.reset_peak(_index(given)),
    set_device=lambda given: _take(_index(given)),
    set_rng_state=lambda state, given="cuda": None,
    set_stream=set_stream,
    stream=use_stream,
    synchronize=lambda given=None: device.synchronize(),
)
_replace(torch.cuda.nccl, version=lambda: (2, 27, 5))
torch._C._cuda_isCurrentStreamCapturing = lambda: False  # type: ignore[attr-defined]

_clone = torch.UntypedStorage.clone


def _clone_storage(self: torch.UntypedStorage) -> torch.UntypedStorage:
    if self.device.type != "cuda":
        return _clone(self)
    return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self).clone().untyped_storage()


torch.UntypedStorage.clone = _clone_storage  # type: ignore[method-assign]
