"""What has gone wrong in other people's programs that move saved tensors, each by its name."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.memory.stores import LateMover, SlowStore, offload
from tests.memory.zoo import drawn, leaf
from tiledseg.errors import WriteError
from tiledseg.memory.file_store import FileStore
from tiledseg.memory.mover import PAGE, store_rates
from tiledseg.memory.offload import Offload

KIBI = 1 << 10
pytestmark = pytest.mark.usefixtures("everything_is_given_back")


def chain(x: torch.Tensor, length: int = 4) -> torch.Tensor:
    """Each step but the last saves a storage as large as `x`, which nobody else holds."""
    for k in range(length):
        x = (x * (1 + k / 8)).sin()
    return (x * x).sum()


def expected(x: torch.Tensor, length: int = 4) -> torch.Tensor:
    return torch.autograd.grad(chain(x, length), x)[0]


# What a storage is.


def test_bytes_outside_are_those_of_storages_not_of_views(tmp_path: Path) -> None:
    """Transposed, cut and expanded views of one storage are moved as the one that it is."""
    x = leaf(64, 64, step=1)

    def loss() -> torch.Tensor:
        base = x * 2
        views = (base.t(), base[3:40], base.expand(5, 64, 64), base.flatten())
        return torch.stack([(view * view).sum() for view in views]).sum()

    plain = torch.autograd.grad(loss().sin(), x)[0]
    with offload(tmp_path, 0, least=KIBI) as moving:
        assert torch.equal(torch.autograd.grad(loss().sin(), x)[0], plain)
    assert moving.figures.bytes_out == moving.figures.bytes_in == x.nbytes


def test_weights_buffers_inputs_and_small_tensors_never_leave(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 256))
    batch = drawn(64, 256, step=1)
    sent: list[int] = []

    class Noting(FileStore):
        def send(self, flat_P: torch.Tensor):  # type: ignore[no-untyped-def]
            sent.append(flat_P.data_ptr())
            return super().send(flat_P)

    with Offload(lambda: Noting(tmp_path, 1 << 28), 0, 16 * KIBI) as moving:
        for _ in range(3):
            network(batch).square().mean().backward()
    stay = {t.data_ptr() for t in (batch, *network.parameters(), *network.buffers())}
    assert not stay & set(sent)
    assert moving.figures.bytes_out == 3 * 2 * batch.nbytes  # the outputs of the first two layers


# Writing over what is kept.


@pytest.mark.parametrize("budget", [0, 1 << 30])
@pytest.mark.parametrize("where", ["a weight", "an output", "a view of it", "what has left"])
def test_writing_over_what_is_kept_stays_an_error(tmp_path: Path, where: str, budget: int) -> None:
    def attempt() -> None:
        w = nn.Parameter(torch.ones(64, 64))
        x = leaf(64, 64, step=1)
        y = (x * w).sin().exp()
        loss = chain(y.sin() * y)
        with torch.no_grad():
            {"a weight": w, "an output": y, "a view of it": y[2:3], "what has left": y}[where].add_(1)
        if where == "what has left":
            del y
            loss = loss + chain(x)
        loss.backward()

    words = "one of the variables needed for gradient computation has been modified by an inplace operation"
    with pytest.raises(RuntimeError, match=words):
        attempt()
    with offload(tmp_path, budget), pytest.raises(RuntimeError, match=words):
        attempt()


class Spoiling(torch.autograd.Function):
    """Writes over what it was given back."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return grad * x.add_(1)


def test_a_backward_pass_that_spoils_what_others_need_stays_an_error(tmp_path: Path) -> None:
    def attempt() -> None:
        x = leaf(64, 64, step=1)

        def loss() -> torch.Tensor:
            y = x * 2
            return chain(y.sin() + Spoiling.apply(y))  # the sine is made first, so that it comes after in the way back

        loss().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        attempt()
    with offload(tmp_path, 0), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        attempt()


# Copies that take their time.


class HeldStore(FileStore):
    """Writes wait until they are let go."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.let_go = threading.Event()
        super().__init__(folder, limit)

    def _move(self, move, slot, data):  # type: ignore[no-untyped-def]
        self.let_go.wait(100)
        super()._move(move, slot, data)


def test_what_is_wanted_before_its_copy_has_ended_is_taken_from_memory(tmp_path: Path) -> None:
    x = leaf(64, 64, step=1)
    stores = [HeldStore(tmp_path, 1 << 24)]
    budget = 4 * x.nbytes
    with Offload(lambda: stores[0], budget, KIBI) as moving:
        loss = chain(x, 4)  # all fits as long as nothing has to leave at once
        threading.Timer(0.2, stores[0].let_go.set).start()
        loss.backward()
    assert torch.equal(x.grad, expected(x))
    assert moving.figures.bytes_in < x.nbytes * 4


def test_the_budget_holds_at_every_save(tmp_path: Path) -> None:
    """What autograd alone holds, prefetched bytes included, stays within the budget, in the first step too. No more
    than the rest of the 21 storages of a step leaves."""
    x = leaf(128, 128, step=1)
    budget = 5 * x.nbytes
    with offload(tmp_path, budget, SlowStore) as moving:
        for _ in range(4):
            chain(x, 20).backward()
    assert x.nbytes <= moving.figures.peak_bytes <= budget
    assert moving.figures.bytes_in == moving.figures.bytes_out == 4 * 16 * x.nbytes


# Ends of all kinds.


def test_a_graph_outlives_the_context(tmp_path: Path) -> None:
    x = leaf(64, 64, step=1)
    with offload(tmp_path, 0):
        loss = chain(x)
        unused = chain(leaf(64, 64, step=1))
    loss.backward()
    assert torch.equal(x.grad, expected(x))
    assert unused.requires_grad


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_after_an_exception_all_is_given_back_and_the_next_step_is_right(tmp_path: Path, place: str) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            if place == "forward":
                raise ZeroDivisionError("on purpose")
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            raise ZeroDivisionError("on purpose")

    x = leaf(64, 64, step=1)
    moving = offload(tmp_path, 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), moving:
            chain(Failing.apply(chain(x) * x.exp().sin())).backward()
        with moving:
            assert torch.equal(torch.autograd.grad(chain(x), x)[0], expected(x))


def test_a_context_within_another_and_within_itself(tmp_path: Path) -> None:
    x = leaf(64, 64, step=1)
    outer, inner = offload(tmp_path, 0), offload(tmp_path, 0)
    with outer:
        middle = x.exp().sin() * 1
        with inner, inner:
            loss = chain(middle.cos())
        del middle
        (loss * loss).backward()
    again = x.detach().requires_grad_()
    plain = chain((again.exp().sin() * 1).cos())
    (plain * plain).backward()
    assert torch.equal(x.grad, again.grad)
    assert outer.figures.bytes_out > 0
    assert inner.figures.bytes_out > 0


def test_a_full_disk_ends_the_step_with_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    def step() -> None:
        with moving, monkeypatch.context() as patch:
            patch.setattr("os.pwritev", full)
            chain(x).backward()

    x = leaf(64, 64, step=1)
    moving = offload(tmp_path, 0)
    with pytest.raises(WriteError, match=r"No space left on device; \d+ bytes"):
        step()
    with moving:
        assert torch.equal(torch.autograd.grad(chain(x), x)[0], expected(x))


# Long runs.


@pytest.mark.parametrize("kind", ["file", "host"])
def test_many_steps_take_no_more_than_two(tmp_path: Path, kind: str) -> None:
    """Descriptors, places in the store, and the host's memory. A slot is free once its copy has ended, so that how many
    a step takes at once depends on the disk: at most one for each storage that it keeps."""
    x = leaf(64, 64, step=1)
    stores: list[FileStore | LateMover] = []

    def mover() -> FileStore | LateMover:
        stores.append(FileStore(tmp_path, 1 << 24) if kind == "file" else LateMover(1, 1 << 24))
        return stores[0]

    plain = expected(x, 8)
    with Offload(mover, 4 * x.nbytes, KIBI) as moving:
        for step in range(60):
            assert torch.equal(torch.autograd.grad(chain(x, 8), x)[0], plain)
            if step == 1:
                descriptors, places = len(os.listdir("/proc/self/fd")), stores[0].end
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert stores[0].end <= (8 * x.nbytes if kind == "file" else places)
    assert moving.figures.bytes_out > 60 * x.nbytes
    assert moving.figures.peak_bytes <= 4 * x.nbytes


def test_rates_are_those_of_bytes_both_ways() -> None:
    mover = LateMover(0)
    rates = store_rates(mover, 8 * PAGE, 2 * PAGE)
    assert min(rates.written, rates.read) > 0
    assert mover.lanes == ([], []), "all copies have been waited for"
