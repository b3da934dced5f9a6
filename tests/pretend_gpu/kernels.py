"""The pretend GPU's kernels: those of the CPU on the same memory, at once. Copies and scalars make the host wait."""

from __future__ import annotations

import functools
from typing import Any

from tests.pretend_gpu import device as gpu
from tests.pretend_gpu.device import Access, native, torch

from torch.utils._pytree import tree_map  # isort: skip

# torch's list in `use_deterministic_algorithms`, as far as it raises on CUDA.
UNORDERED = {f"aten::{name}" for name in ("put_", "cumsum", "histc", "kthvalue", "median.dim", "max_unpool2d")}
UNORDERED |= {f"aten::{name}" for name in ("nll_loss2d_forward", "max_pool3d_with_indices_backward")}
UNORDERED |= {f"aten::{name}1d_backward" for name in ("upsample_linear", "reflection_pad")}
UNORDERED |= {f"aten::{name}2d_backward" for name in ("upsample_bilinear", "upsample_bicubic", "reflection_pad")}
UNORDERED |= {f"aten::{name}2d_backward" for name in ("_adaptive_avg_pool", "adaptive_max_pool", "nll_loss")}
UNORDERED |= {f"aten::{name}_backward" for name in ("grid_sampler_2d", "fractional_max_pool2d", "avg_pool3d")}
# The host reads a size from the GPU.
WAITING = {f"aten::{name}" for name in ("bincount", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2")}
WAITING |= {f"aten::{name}" for name in ("unique_dim", "unique_consecutive", "repeat_interleave.Tensor")}


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return native.on_host(tensor) if tensor.is_cuda else tensor


def copy_(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not to.numel():
        return to
    within, out = to.is_cuda and source.is_cuda, not to.is_cuda
    index = (source if out else to).device.index
    stream = native.stream_number(index)
    low, high = native.span_of(to if out else source)  # on the host, if any is there
    op = f"copy{'' if within else ' out' if out else ' in'}{', non-blocking' if non_blocking else ''}"
    with gpu.locked():
        pinned = not within and gpu.is_pinned(low)
        count = gpu.launch(index, stream)
        for tensor, writes in ((source, False), (to, True)):
            if tensor.is_cuda or pinned:
                gpu.note(Access(*native.span_of(tensor), stream, count, writes, op))
        if pinned:  # it reads what a copy out has brought, or writes what an earlier copy of its stream has read
            gpu.settle([copy for copy in gpu.copies_at(low, high) if (copy.access.before(stream) if out else copy.out)])
    _on_host(to).copy_(_on_host(source))
    with gpu.locked():
        if pinned and non_blocking:
            memory = gpu.memory_at(low, high)[1]  # type: ignore[index]
            gpu.copies.append(gpu.Copy(Access(low, high, stream, count, out, op), out, memory, memory.copy()))
            if out:
                memory[:] = 0xCD
        elif not within:
            gpu.wait(f"{op}, {'pinned' if pinned else 'pageable'}", gpu.clocks[stream])
    return to


def item(tensor: torch.Tensor) -> Any:
    stream = native.stream_number(tensor.device.index)
    with gpu.locked():
        gpu.note(Access(*native.span_of(tensor), stream, gpu.launch(tensor.device.index, stream), False, "item"))
        gpu.wait("item", gpu.clocks[stream])
    return native.on_host(tensor).item()


def record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    gpu.record_stream(tensor.untyped_storage().data_ptr(), stream.stream_id or stream.device_index)


class Call:
    """A call of an operation, whose kernel of the CPU runs on the same memory."""

    def __init__(self, op: str) -> None:
        self.op, self.device = op, -1
        self.tensors: list[tuple[torch.Tensor, torch.Tensor, bool]] = []  # the device's, the host's, if it is written
        self.of_cpu: list[torch.Tensor] = []
        self.waits: list[str] = [op] if {op, op.partition(".")[0]} & WAITING else []

    def take(self, value: Any, writes: bool) -> Any:
        """Return an argument with tensors of the host in the place of the device's."""
        if isinstance(value, torch.device) and value.type == "cuda":
            self.device = native.current_device() if value.index is None else value.index
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_cuda:
            self.of_cpu += [value] if value.dim() else []
            return value
        if value.dim() or self.device < 0:
            self._check(self.device in (-1, value.device.index), value.device)
            self.device = value.device.index
        there = native.on_host(value) if value.numel() or not writes else torch.empty(value.shape, dtype=value.dtype)
        self.tensors.append((value, there, writes))
        return there

    def take_index(self, value: Any) -> Any:
        """Take a tensor of an index: masks make the host wait, indices of the host are copied."""
        if value is None:
            return None
        self.waits += [f"{self.op} by a mask"] if value.dtype in (torch.bool, torch.uint8) else []
        self.waits += [] if value.is_cuda else [f"{self.op} by the host's indices"]
        return self.take(value, False) if value.is_cuda else value

    def start(self) -> tuple[int, int]:
        """Launch it; return its stream and count."""
        self._check(self.device < 0 or not self.of_cpu, "cpu")
        self.device = max(0, self.device)
        stream = native.stream_number(self.device)
        with gpu.locked():
            gpu.fail_if_told(self.op)
            count = gpu.launch(self.device, stream)
            for tensor, _, writes in self.tensors:
                gpu.note(Access(*native.span_of(tensor), stream, count, writes, self.op))
            for kind in self.waits:
                gpu.wait(kind, gpu.clocks[stream])
        return stream, count

    def give(self, value: Any, stream: int, count: int) -> Any:
        """Return a result with tensors of the device."""
        if not isinstance(value, torch.Tensor) or any(value is each for each in self.of_cpu):
            return value
        for tensor, there, _ in self.tensors:
            if value is there:
                return tensor
            if value.numel() and value.untyped_storage().data_ptr() == there.untyped_storage().data_ptr():
                offset = tensor.storage_offset() + value.storage_offset()
                return tensor.as_strided(value.shape, value.stride(), offset)
        place = torch.device("cuda", self.device)
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=place)
        native.on_host(made).copy_(value)
        with gpu.locked():
            gpu.note(Access(*native.span_of(made), stream, count, True, self.op))
        return made

    def _check(self, alike: bool, other: object) -> None:
        if not alike:
            two = f"at least two devices, cuda:{self.device} and {other}! ({self.op})"
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {two}")


def run_on_host(operation: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    call, schema = Call(operation._name), {each.name: each for each in operation._schema.arguments}
    if {call.op, call.op.partition(".")[0]} & UNORDERED:
        native.alert(call.op)
    given: dict[str, Any] = {}
    for name, value in (*zip(schema, args, strict=False), *kwargs.items()):
        alias = schema[name].alias_info
        if type(value) in (int, float) and str(schema[name].type) == "Tensor":
            by_number = torch._C._should_allow_numbers_as_tensors(call.op.split("::")[1].split(".")[0])
            value = value if by_number else torch.tensor(value)
        indexes = name == "indices" and isinstance(value, list)
        writes = alias is not None and alias.is_write
        take = call.take_index if indexes else functools.partial(call.take, writes=writes)
        given[name] = [take(each) for each in value] if isinstance(value, list) else take(value)
    if call.op == "aten::convolution" and given["input"].dtype != given["weight"].dtype:
        raise RuntimeError("Input type and weight type should be the same")
    stream, count = call.start()
    result = operation(*list(given.values())[: len(args)], **dict(list(given.items())[len(args) :]))
    for tensor, there, writes in call.tensors:
        if writes and there.numel() and not tensor.numel():  # `out=` of an empty tensor
            native.on_host(tensor.resize_(there.shape)).copy_(there)
    return tree_map(lambda value: call.give(value, stream, count), result)


_everything, _aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_everything.fallback(run_on_host, "CUDA")
for _name, _kernel in (("copy_", copy_), ("_local_scalar_dense", item), ("record_stream", record_stream)):
    _aten.impl(_name, _kernel, "CUDA")
for _name in ("convolution", "convolution_backward"):
    _operation = getattr(torch.ops.aten, _name).default
    _aten.impl(_name, lambda *args, _operation=_operation, **kwargs: run_on_host(_operation, *args, **kwargs), "CUDA")
