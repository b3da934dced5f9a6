"""A GPU's tensors in the host's memory: the law where copies, kernels and the host really run apart."""

from __future__ import annotations

import copy
import os
from functools import partial

import pytest
import torch

import tiledseg
from tests.foreign.modules import Somebody
from tests.memory.test_recomputing import loop
from tiledseg.execution.carrying import make_deterministic
from tiledseg.memory.host import HostMover

MIB = 1 << 20
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    make_deterministic(True)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stream", ["the usual", "another"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loop_ends_with_the_same_weights(precision: str, stream: str, late: bool) -> None:
    """`late`: the GPU has something else to do before each step, so that the host is far ahead."""
    begin = partial(torch.cuda._sleep, 50_000_000 if late else 0)
    torch.manual_seed(3)
    network = Somebody(bands=3, width=32, norm=True).cuda()
    again, x = copy.deepcopy(network), torch.randn(4, 3, 256, 256, device="cuda")
    side = torch.cuda.Stream() if stream == "another" else torch.cuda.current_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
        plain = loop(network, x, 4, begin)
        with tiledseg.large_model_support(budget="48MiB") as support:
            found = loop(again, x, 4, begin)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert support.figures.bytes_out > 0


def chain(x: torch.Tensor) -> torch.Tensor:
    """Sixteen storages as large as `x` are kept of it."""
    for k in range(16):
        x = (x * (1 + k / 8)).sin()
    return x.sum()


def test_the_allocators_peak_is_the_budgets_and_stays() -> None:
    """Beside what the budget counts: `x`, the expected gradient, four of the running operation (what it has saved, its
    gradients in and out, a factor), and some on their way: 7 to 8 in all on an H100, as copies lag behind."""
    budget, x = 96 * MIB, torch.randn(4 * MIB, device="cuda", requires_grad=True)
    expected = torch.autograd.grad(chain(x), x)[0]
    torch.cuda.empty_cache()
    with tiledseg.large_model_support(budget=budget):
        reserved = []
        for step in range(200):
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
            assert torch.equal(torch.autograd.grad(chain(x), x)[0], expected)
            reserved.append(torch.cuda.memory_reserved())
    assert torch.cuda.max_memory_allocated() <= budget + 9 * x.nbytes
    assert reserved[-1] == reserved[10]
    assert reserved[-1] <= 1.1 * torch.cuda.max_memory_allocated() + 20 * MIB


def test_bytes_go_out_and_come_back_while_the_gpu_computes() -> None:
    """Brought before anybody waits, and used on another stream than they were asked for."""
    device = torch.device("cuda", torch.cuda.current_device())
    mover, side = HostMover(device, 64 * MIB, chunk=MIB // 64), torch.cuda.Stream()
    data = torch.randint(0, 256, (MIB // 8 + 17,), dtype=torch.uint8, device=device)
    torch.cuda._sleep(50_000_000)
    flat_P = data + 1  # made after the sleep, which the copy waits for
    expected_P = flat_P.clone()
    sent = mover.send(flat_P)
    assert "PRETEND_GPU_DEVICES" in os.environ or not sent.done()
    found_P, copying = mover.bring(sent)
    sent.wait()
    flat_P.zero_()
    with torch.cuda.stream(side):
        copying.wait()
        kept_P = found_P.clone()
    del found_P, copying
    torch.zeros_like(data)  # given the memory that came back
    mover.drop(sent)
    torch.cuda.synchronize()
    assert torch.equal(kept_P, expected_P)
    mover.close()


def test_copies_wait_for_all_streams_that_compute() -> None:
    """Made on one stream, sent from another one, and its memory given out again on the first."""
    device, side = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
    mover = HostMover(device, 64 * MIB)
    with torch.cuda.stream(side):
        data = torch.arange(MIB // 8, device=device)
        assert mover.takes(data)
    sent = mover.send(data.view(torch.uint8))
    sent.wait()
    with torch.cuda.stream(side):
        del data
        torch.zeros(MIB // 8, dtype=torch.int64, device=device)
    found_P, copying = mover.bring(sent)
    copying.wait()
    assert torch.equal(found_P.view(torch.int64).cpu(), torch.arange(MIB // 8))
    mover.drop(mover.send(found_P))  # wanted before it has left
    del found_P, copying
    torch.zeros(MIB, dtype=torch.uint8, device=device)
    mover.close()
