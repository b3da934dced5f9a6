"""The pretend GPU itself: it finds races, waits and mixed devices, and lets sound programs pass."""

from __future__ import annotations

from tests.pretend_gpu.harness import PretendGpu

RACES = """
import torch
from tests.pretend_gpu.device import gpu

side = torch.cuda.Stream()

def racy(body):
    gpu.races.clear()
    body()
    torch.cuda.synchronize()
    return bool(gpu.races)

def unordered():
    x = torch.zeros(4, device="cuda")
    with torch.cuda.stream(side):
        x.add_(1)

def ordered():
    x = torch.zeros(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    x.add_(1)

def freed_early(record):
    x = torch.zeros(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    if record:
        x.record_stream(side)
    del x
    torch.zeros(4, device="cuda")

def pinned_source(wait):
    source = torch.zeros(4).pin_memory()
    source.to("cuda", non_blocking=True)
    if wait:
        torch.cuda.synchronize()
    source.fill_(1)
    torch.cuda.synchronize()

assert racy(unordered) and not racy(ordered)
assert racy(lambda: freed_early(False)) and not racy(lambda: freed_early(True))
assert racy(lambda: pinned_source(False)) and not racy(lambda: pinned_source(True))

target = torch.zeros(4).pin_memory()
target.copy_(torch.ones(4, device="cuda"), non_blocking=True)
assert not (target == 1).any()
done = torch.cuda.Event()
done.record()
done.synchronize()
assert (target == 1).all()

assert torch.empty(3, device="cuda").cpu().isnan().all()
try:
    torch.ones(2, device="cuda") + torch.ones(2)
    raise SystemExit("mixed devices")
except RuntimeError as error:
    assert "same device" in str(error)
torch.use_deterministic_algorithms(True)
x = torch.ones(1, 1, 4, 4, device="cuda", requires_grad=True)
try:
    torch.nn.functional.pad(x, (1, 1, 1, 1), mode="reflect").sum().backward()
    raise SystemExit("deterministic")
except RuntimeError as error:
    assert "deterministic" in str(error)
gpu.failures["aten::convolution"] = "AcceleratorError", "CUDA error: out of memory"
try:
    torch.nn.functional.conv2d(x, x[:, :, :3, :3])
    raise SystemExit("no failure")
except torch.AcceleratorError as error:
    assert "out of memory" in str(error)
gpu.races.clear(), gpu.waits.clear()
torch.ones(2, device="cuda").sum().item()
"""


def test_races_waits_and_failures(pretend_gpu: PretendGpu) -> None:
    waits = pretend_gpu.python(RACES).sound().report["waits"]
    assert [(kind, count) for kind, _, count in waits] == [("item", 1)]
