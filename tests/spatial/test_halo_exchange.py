"""The halo exchange against the undivided image: windows are cut from it, gradients are added up over it.

Values are small whole numbers, so every sum is exact in float32 too and results are compared to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.geometry.drawn import law, partitions, windows
from tests.spatial.thread_ranks import on_ranks
from tests.spatial.twins import OpenAxes
from tiledseg.comm.mesh import Axes
from tiledseg.geometry.box import Interval
from tiledseg.geometry.sharing.decomposition import (
    BlockExchange,
    MeshPosition,
    Partition,
    block_exchange,
)
from tiledseg.spatial.halo_exchange import exchanged, part

MARGIN = 16  # windows reach this far beyond the image at most


@dataclass(frozen=True)
class Case:
    """One exchange of a mesh: who owns what and who wants what along both dims; None: that dim does not travel."""

    rows: Partition
    cols: Partition
    row_windows: tuple[Interval, ...] | None
    col_windows: tuple[Interval, ...] | None
    batch: int = 1
    channels: int = 1
    dtype: torch.dtype = torch.float64
    channels_last: bool = False
    fill: float = 0.0
    is_view: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.channels, self.rows.size, self.cols.size

    def image(self, seed: int) -> torch.Tensor:
        """Whole numbers from -3 to 3, the same on every rank."""
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(-3, 4, self.shape, generator=draw).to(self.dtype)

    def owned(self, at: MeshPosition) -> tuple[slice, ...]:
        return slice(None), slice(None), self.rows.blocks[at.row].slice, self.cols.blocks[at.col].slice

    def window(self, at: MeshPosition) -> tuple[slice, ...]:
        """Where the window lies in an image with a margin on all sides."""
        row = self.row_windows[at.row] if self.row_windows else self.rows.blocks[at.row]
        col = self.col_windows[at.col] if self.col_windows else self.cols.blocks[at.col]
        return slice(None), slice(None), row.shift(MARGIN).slice, col.shift(MARGIN).slice

    def exchange(self, at: MeshPosition) -> BlockExchange | None:
        return block_exchange(
            (self.rows, self.row_windows) if self.row_windows else None,
            (self.cols, self.col_windows) if self.col_windows else None,
            (at.row, at.col),
        )

    def with_margin(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x_BCHW, (MARGIN,) * 4, value=self.fill)

    def block(self, x_BCHW: torch.Tensor, at: MeshPosition) -> torch.Tensor:
        """A tensor of its own, or a view of a larger one."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        if self.is_view:
            return torch.nn.functional.pad(x_BCHW[self.owned(at)], (1, 2, 3, 1), value=99.0)[:, :, 3:-1, 1:-2]
        return x_BCHW[self.owned(at)].clone(memory_format=layout)

    def weights(self, at: MeshPosition, seed: int) -> torch.Tensor:
        """What the rank at `at` multiplies its window by: numbers, or one seen everywhere."""
        shape = [part.stop - part.start for part in self.window(at)[2:]]
        if self.is_view:
            return torch.ones((), dtype=self.dtype).expand(*self.shape[:2], *shape)
        draw = torch.Generator().manual_seed(1000 * seed + 100 * at.row + at.col)
        return torch.randint(-3, 4, (*self.shape[:2], *shape), generator=draw).to(self.dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any widths on any side of any rank: none, a crop, several hops, beyond the image, all of it elsewhere."""
    shape = draw(st.sampled_from([(1, 1), (1, 2), (3, 1), (2, 2), (2, 3)]))
    rows, cols = (draw(partitions(parts=parts, largest=9)) for parts in shape)
    travels = draw(st.sampled_from(["rows", "cols", "both", "both", "both"]))
    return Case(
        rows,
        cols,
        draw(windows(rows)) if travels != "cols" else None,
        draw(windows(cols)) if travels != "rows" else None,
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([torch.float32, torch.float64])),
        draw(st.booleans()),
        draw(st.sampled_from([0.0, 7.0, float("-inf")])),
        draw(st.booleans()),
    )


def expected_gradient(case: Case, axes: Axes, seed: int) -> torch.Tensor:
    """The gradient on the undivided image: every rank's weights added where its window lies."""
    total_BCHW = replace(case, fill=0.0).with_margin(torch.zeros(case.shape, dtype=case.dtype))
    for row in range(axes.shape.rows):
        for col in range(axes.shape.cols):
            at = MeshPosition(0, row, col)
            total_BCHW[case.window(at)] += case.weights(at, seed)
    return total_BCHW[:, :, MARGIN:-MARGIN, MARGIN:-MARGIN]


def fault_of(case: Case, axes: Axes, seed: int = 1) -> str | None:
    """Forward and backward. Collective over the ranks of the image."""
    at = axes.position
    if at is None:
        return None
    x_BCHW = case.block(case.image(seed), at).requires_grad_()
    weights_BCHW = case.weights(at, seed)
    window_BCHW = exchanged(x_BCHW, case.exchange(at), axes, case.fill)
    (dx_BCHW,) = torch.autograd.grad(window_BCHW, x_BCHW, weights_BCHW)
    image_BCHW, gradient_BCHW = case.image(seed), expected_gradient(case, axes, seed)[case.owned(at)]
    # A gradient that nobody else has, which is added to where it lies.
    layout = torch.channels_last if case.channels_last else torch.contiguous_format
    owned_BCHW = exchanged(x_BCHW, case.exchange(at), axes, case.fill, owned=True)
    own_BCHW = weights_BCHW.clone(memory_format=layout)
    (dx_owned_BCHW,) = torch.autograd.grad(owned_BCHW, x_BCHW, own_BCHW)
    if not torch.equal(window_BCHW, case.with_margin(image_BCHW)[case.window(at)]):
        return "the window is not that of the image"
    if not torch.equal(dx_BCHW, gradient_BCHW):
        return "the gradient is not the sum of the windows' gradients"
    if case.exchange(at) is not None and not torch.equal(dx_owned_BCHW, gradient_BCHW):
        return "a gradient that is added to where it lies is not the sum"
    return None if torch.equal(x_BCHW, case.block(image_BCHW, at)) else "the block was written over"


@settings(law, max_examples=100)
@given(cases())
def test_windows_and_gradients(case: Case) -> None:
    """On ranks that are threads."""
    assert not any(on_ranks(case.rows.parts, case.cols.parts, lambda axes: fault_of(case, axes)))


def thin(rows: int, cols: int, before: int, after: int, dtype: torch.dtype = torch.float64) -> Case:
    """Uneven blocks with the same halo everywhere, cut at the image's ends."""
    edges = (0, 3, 4, 9, 11)
    parts = [Partition((*edges[:n], 12)) for n in (rows, cols)]
    wanted = [tuple(b.expand(before, after) for b in p.blocks) for p in parts]
    return Case(*parts, *wanted, dtype=dtype)


@pytest.mark.mpi
@pytest.mark.nine
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("before", "after", "dtype"),
    [(1, 1, torch.float32), (2, 0, torch.float64), (0, 3, torch.float64), (7, 5, torch.float32)],
)
def test_thin_halos_and_those_of_several_hops(opened: OpenAxes, before: int, after: int, dtype: torch.dtype) -> None:
    """7 and 5 pixels reach over whole blocks of 1, 2 and 3."""
    for shape in opened.shapes():
        opened.agree(fault_of(thin(*shape, before, after, dtype), opened.of(*shape)))


@pytest.mark.mpi
@pytest.mark.timeout(120)
def test_traffic_is_what_the_plan_says(opened: OpenAxes) -> None:
    """Messages and bytes forward, and as many backward; none where each rank wants its own."""
    rows, cols = opened.shapes()[-1]
    axes = opened.of(rows, cols)
    at, traffic, fault = axes.position, axes.point_to_point, None
    case = thin(rows, cols, 1, 1)
    if at is not None:
        exchange = case.exchange(at)
        x_BCHW = case.block(case.image(0), at).requires_grad_()
        traffic.reset()
        own = Case(case.rows, case.cols, case.rows.blocks, case.cols.blocks)
        assert exchanged(x_BCHW, own.exchange(at), axes) is x_BCHW
        assert (traffic.messages, traffic.bytes) == (0, 0)
        assert exchange is not None, "a rank has a neighbour"
        window_BCHW = exchanged(x_BCHW, exchange, axes)
        messages, pixels = len(exchange.sends), sum(part(x_BCHW, patch).numel() for patch in exchange.sends.values())
        if (traffic.messages, traffic.bytes) != (messages, 8 * pixels):
            fault = f"sent {traffic.messages} messages and {traffic.bytes} bytes, not {messages} and {8 * pixels}"
        window_BCHW.sum().backward()
        back = len(exchange.receives)
        if fault is None and traffic.messages != messages + back:
            fault = f"sent {traffic.messages - messages} messages backward, not {back}"
    opened.agree(fault)
