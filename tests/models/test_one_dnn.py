"""oneDNN's convolutions by other ways: pixels as channels of one, bands of rows on all cores. Bits are torch's."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tiledseg.models.layers.on_cpu import one_dnn, pixels_as_channels
from tiledseg.models.layers.on_cpu.beside import can_share, side_by_side
from tiledseg.models.layers.on_cpu.how import How
from tiledseg.models.layers.on_cpu.one_dnn import activated, convolved
from tiledseg.models.layers.on_cpu.pixels_as_channels import takes_two
from tiledseg.tracing.allocations import AllocationMeter

WIDE_VECTORS = torch.backends.cpu.get_cpu_capability() == "AVX512" and "ONEDNN_MAX_CPU_ISA" not in os.environ


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def image(*shape: int, seed: int = 1) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw).contiguous(memory_format=torch.channels_last)


@pytest.fixture
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels_as_channels, "_WORTH_IT", 1)
    monkeypatch.setattr(one_dnn, "_WORTH_BANDS", 1)


@pytest.mark.usefixtures("small_ones_too")
@pytest.mark.parametrize("count", [1, 2])
def test_two_pixels_at_once_have_the_bits_of_one(count: int) -> None:
    """Of any size, whether it takes two or not: a tile of odd width has the bits of an even one."""
    draw, taken = random.Random(3), 0
    with threads(count), torch.no_grad():
        for seed in range(400):
            inputs, rows, cols = draw.choice((2, 3, 4, 8, 16, 32)), draw.choice((1, 3, 5)), draw.choice((2, 3, 4, 5))
            size = draw.randint(1, 2), inputs, draw.randint(rows, 30), draw.randint(cols, 160)
            x_BCHW, weight = image(*size, seed=seed), image(8, inputs, rows, cols, seed=seed + 1)
            bias = image(1, 8, 1, 1).flatten() if draw.random() < 0.5 else None
            padding = draw.randint(0, rows - 1), draw.randint(0, cols - 1)
            made = convolved(x_BCHW, weight, bias, How((1, 1), padding, (1, 1)))
            assert torch.equal(made, torch.mkldnn_convolution(x_BCHW, weight, bias, padding, (1, 1), (1, 1), 1))
            assert made.is_contiguous(memory_format=torch.channels_last)
            below = activated(x_BCHW, weight, bias, How((1, 1), padding, (1, 1)), 0.01)
            assert torch.equal(below, torch.nn.functional.leaky_relu(made, 0.01))
            taken += takes_two(x_BCHW, weight, padding)
    if WIDE_VECTORS:
        assert taken > 60


CASES = {
    "same": (4, 8, (3, 3), How((1, 1), (1, 1), (1, 1))),
    "valid": (8, 8, (3, 3), How((1, 1), (0, 0), (1, 1))),
    "padded in rows alone": (8, 5, (3, 3), How((1, 1), (1, 0), (1, 1))),
    "padded widely": (8, 8, (3, 5), How((1, 1), (2, 4), (1, 1))),
    "large kernel": (4, 16, (7, 5), How((1, 1), (3, 2), (1, 1))),
    "strides, dilation": (6, 8, (3, 3), How((2, 2), (2, 2), (2, 2))),
    "strides that leave rows": (3, 8, (2, 2), How((3, 3), (0, 0), (1, 1))),
    "pixels": (8, 5, (1, 1), How((1, 1), (0, 0), (1, 1))),
    "pixels, padded": (8, 5, (1, 1), How((1, 1), (1, 1), (1, 1))),
    "padded beyond its kernel": (8, 8, (1, 3), How((1, 1), (1, 3), (1, 1))),
    "one output": (8, 1, (3, 3), How((1, 1), (1, 1), (1, 1))),
    "pairs of many inputs": (24, 8, (3, 3), How((1, 1), (1, 1), (1, 1))),
    "pairs on both sides, a large kernel": (10, 8, (5, 5), How((1, 1), (2, 2), (1, 1))),
    "pairs on both sides, half padded": (8, 8, (3, 5), How((1, 1), (1, 1), (1, 1))),
    "pairs, an even kernel": (8, 8, (2, 3), How((1, 1), (0, 1), (1, 1))),
    "pairs, four columns": (8, 8, (1, 4), How((1, 1), (0, 0), (1, 1))),
    "pairs, seven columns": (8, 8, (1, 7), How((1, 1), (0, 3), (1, 1))),
    "transposed": (16, 8, (2, 2), How((2, 2), (0, 0), (1, 1), transposed=True)),
    "transposed, wide": (6, 5, (2, 3), How((2, 3), (0, 0), (1, 1), transposed=True)),
    "transposed, padded": (6, 8, (4, 4), How((2, 2), (1, 1), (1, 1), transposed=True)),
    "transposed, dense": (6, 8, (3, 3), How((1, 1), (1, 1), (1, 1), transposed=True)),
}


@pytest.mark.usefixtures("small_ones_too")
@pytest.mark.parametrize("height", [5, 37, 64])
@pytest.mark.parametrize("name", CASES)
def test_gradients_by_bands_are_those_of_torch(name: str, height: int) -> None:
    inputs, outputs, size, how = CASES[name]
    x_BCHW = image(1, inputs, height, 46)
    weight = image(*((inputs, outputs) if how.transposed else (outputs, inputs)), *size, seed=2)
    theirs = [each.double().requires_grad_() for each in (x_BCHW, weight, torch.ones(outputs))]
    kind = torch.nn.functional.conv_transpose2d if how.transposed else torch.nn.functional.conv2d
    expected = kind(theirs[0], theirs[1], theirs[2], how.stride, how.padding, dilation=how.dilation)
    g_BCHW = image(*expected.shape, seed=3)
    wanted = torch.autograd.grad(expected, theirs, g_BCHW.double())
    found = []
    for count in (1, 3, 2, 2):
        with threads(count):
            ours = [
                each.detach().clone(memory_format=torch.preserve_format).requires_grad_()
                for each in (x_BCHW, weight, torch.ones(outputs))
            ]
            made = convolved(ours[0], ours[1], ours[2], how)
            found.append(torch.autograd.grad(made, ours, g_BCHW))
        for their, own in zip(wanted, found[-1], strict=True):
            assert own.shape == their.shape
            torch.testing.assert_close(own.double(), their, rtol=0, atol=2e-5 * their.abs().max().item())
    assert all(torch.equal(*pair) for pair in zip(found[-2], found[-1], strict=True)), "whoever takes which band"


@pytest.mark.usefixtures("small_ones_too")
@pytest.mark.parametrize("count", [1, 2])
def test_gradients_of_weights_by_pairs_are_those_one_by_one(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the kernel, its padding and the size: where half a vector would idle, as elsewhere."""
    draw, pairs = random.Random(5), Pairs(pixels_as_channels.of_pairs)
    monkeypatch.setattr(one_dnn, "of_pairs", pairs)
    with threads(count):
        for seed in range(300):
            inputs, rows, cols = draw.choice((2, 3, 8, 10, 15, 16, 32, 33)), draw.choice((1, 3)), draw.randint(2, 7)
            size = draw.randint(1, 2), inputs, draw.randint(rows, 20), draw.randint(cols, 60)
            weight = image(8, inputs, rows, cols, seed=seed + 1).requires_grad_()
            how = How((1, 1), (draw.randint(0, rows - 1), draw.randint(0, cols - 1)), (1, 1))
            made = convolved(image(*size, seed=seed), weight, None, how)
            g_BCHW = image(*made.shape, seed=seed + 2)
            (found,) = torch.autograd.grad(made, weight, g_BCHW)
            wide = weight.detach().double().requires_grad_()
            plain = torch.nn.functional.conv2d(image(*size, seed=seed).double(), wide, None, 1, how.padding)
            (wanted,) = torch.autograd.grad(plain, wide, g_BCHW.double())
            assert found.shape == weight.shape
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-6 * wanted.abs().max().item())
    if WIDE_VECTORS:
        assert pairs.taken > 40


class Pairs:
    """`of_pairs`, counted."""

    def __init__(self, of_pairs: Any) -> None:
        self.of_pairs, self.taken = of_pairs, 0

    def __call__(self, *given: Any) -> torch.Tensor:
        self.taken += 1
        made: torch.Tensor = self.of_pairs(*given)
        return made


@pytest.mark.parametrize("count", [1, 2])
def test_a_transposed_convolution_gives_a_pixel_the_same_bits_in_any_window(count: int) -> None:
    """Those of torch where it asks oneDNN too, which it does for tensors of more than 20480 values; for smaller ones it
    takes its BLAS, which adds in another order (decision 0002)."""
    draw = random.Random(7)
    with threads(count), torch.no_grad():
        for seed in range(200):
            inputs, outputs, step = draw.choice((2, 3, 8, 10, 16, 24, 64)), draw.randint(1, 24), draw.choice((2, 3, 4))
            kernel, height, width = draw.choice((step, step, step + 1)), draw.randint(1, 20), draw.randint(1, 20)
            how = How((step, step), (0, 0), (1, 1), transposed=True)
            weight = image(inputs, outputs, kernel, kernel, seed=seed + 1)
            bias = image(1, outputs, 1, 1, seed=seed).flatten() if draw.random() < 0.7 else None
            x_BCHW = image(1, inputs, 110, 110, seed=seed)
            whole = convolved(x_BCHW, weight, bias, how)
            assert torch.equal(whole, torch.nn.functional.conv_transpose2d(x_BCHW, weight, bias, step))
            row, col = draw.randint(0, 110 - height), draw.randint(0, 110 - width)
            part = x_BCHW[:, :, row : row + height, col : col + width].contiguous(memory_format=torch.channels_last)
            own = convolved(part, weight, bias, how)
            assert own.is_contiguous(memory_format=torch.channels_last)
            over = kernel - step  # columns that a neighbour adds to
            inner = own[:, :, over : height * step, over : width * step]
            rows = slice(row * step + over, (row + height) * step)
            cols = slice(col * step + over, (col + width) * step)
            assert torch.equal(inner, whole[:, :, rows, cols]), (inputs, outputs, step, kernel, height, width)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("frozen", [(1,), (2,), (1, 2), (0, 1)], ids=str)
def test_what_is_frozen_hands_gradients_on(frozen: tuple[int, ...], transposed: bool) -> None:
    """Of the input, the weight and the bias."""
    tensors = image(1, 8, 64, 64), image(8, 8, 3, 3, seed=2), image(1, 8, 1, 1).flatten()
    for k, each in enumerate(tensors):
        each.requires_grad_(k not in frozen)
    wanted = [each for each in tensors if each.requires_grad]
    how = How((1, 1), (1, 1), (1, 1), transposed)
    kind = torch.nn.functional.conv_transpose2d if transposed else torch.nn.functional.conv2d
    found = [torch.autograd.grad(made.sin().sum(), wanted) for made in (convolved(*tensors, how), kind(*tensors, 1, 1))]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_an_activation_may_overwrite_what_two_at_once_give() -> None:
    x_BCHW, weight = image(1, 8, 64, 64).requires_grad_(), image(8, 8, 3, 3, seed=2).requires_grad_()
    made = convolved(x_BCHW, weight, None, How((1, 1), (1, 1), (1, 1))).relu_()
    assert made.shape == (1, 8, 64, 64)
    made.sum().backward()


@pytest.mark.usefixtures("small_ones_too")
def test_who_counts_operations_sees_the_convolution_itself() -> None:
    x_BCHW, weight = image(1, 8, 32, 64), image(8, 8, 3, 3, seed=2)
    with torch.no_grad(), Weights() as seen:
        convolved(x_BCHW, weight, None, How((1, 1), (1, 1), (1, 1)))
    assert seen.shapes == [(8, 8, 3, 3)]


class Weights(TorchDispatchMode):
    """The shapes of those that convolutions take."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in function.overloadpacket.__name__:
            self.shapes.append(tuple(args[1].shape))
        return function(*args, **(kwargs or {}))


def test_bands_cover_all_rows_once() -> None:
    for rows, padding, stride in itertools.product((1, 2, 3, 9, 64), (0, 1, 3), (1, 2)):
        cuts = one_dnn._cuts(rows, How((stride, stride), (padding, 0), (1, 1)))
        assert cuts[0] == 0
        assert cuts[-1] == rows
        assert cuts == sorted(set(cuts))


# Side by side.


def test_pieces_run_on_all_threads_and_come_back_in_order() -> None:
    seen: set[int] = set()
    both = threading.Barrier(2, timeout=100)

    def piece(k: int) -> torch.Tensor:
        seen.add(threading.get_ident())
        if k < 2:
            both.wait()  # two at once, or never
        assert torch.get_num_threads() == 1
        assert not torch.is_grad_enabled()
        return torch.tensor(k)

    with threads(2):
        made = side_by_side([lambda k=k: piece(k) for k in range(9)])  # type: ignore[misc]
        assert torch.get_num_threads() == 2
    assert [int(each) for each in made] == list(range(9))
    assert len(seen) == 2


@pytest.mark.parametrize("failing", [0, 1, 5])
def test_an_error_of_a_piece_comes_after_all_have_ended(failing: int) -> None:
    ended: list[int] = []

    def piece(k: int) -> torch.Tensor:
        if k == failing:
            raise ValueError(f"piece {k}")
        ended.append(k)
        return torch.zeros(())

    with threads(3):
        for _ in range(20):
            with pytest.raises(ValueError, match=f"piece {failing}"):
                side_by_side([lambda k=k: piece(k) for k in range(6)])  # type: ignore[misc]
            count = len(ended)
            assert torch.get_num_threads() == 3
            assert len(ended) == count


def test_what_one_thread_does_or_somebody_follows_is_not_shared() -> None:
    with threads(1):
        assert not can_share()
    with threads(2):
        assert can_share()
        with AllocationMeter([]):
            assert not can_share()


def test_a_forked_process_has_threads_of_its_own() -> None:
    with threads(2):
        side_by_side([lambda: torch.zeros(())] * 4)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = len(side_by_side([lambda: torch.zeros(())] * 4)) - 4
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
