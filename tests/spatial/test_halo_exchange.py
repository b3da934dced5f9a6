"""The halo exchange against the undivided image: windows are cut from it, gradients are added up over it.

Values are small whole numbers, so every sum is exact in float32 too and results are compared to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import strategies as st

from tests.geometry.drawn import partitions, windows
from tests.spatial.together import for_all
from tests.spatial.twins import NAMED_SHAPES, OpenAxes
from tiledseg.comm.mesh import Axes
from tiledseg.geometry.box import Interval
from tiledseg.geometry.sharing.decomposition import (
    BlockExchange,
    MeshPosition,
    Partition,
    block_exchange,
    plan_exchange,
)
from tiledseg.spatial.halo_exchange import exchanged, part

pytestmark = pytest.mark.timeout(120)
SHAPES = [shape for shape in NAMED_SHAPES if shape[0] * shape[1] <= 4]
MARGIN = 16  # windows reach this far beyond the image at most

mesh_shapes = pytest.mark.parametrize(
    "shape",
    [
        *(pytest.param(s, marks=pytest.mark.mpi(min_size=s[0] * s[1])) for s in SHAPES),
        pytest.param((3, 3), marks=[pytest.mark.mpi(min_size=9), pytest.mark.nine]),
    ],
    ids="{0[0]}x{0[1]}".format,
)


def every_shape(test: Callable[[OpenAxes, tuple[int, int]], None]) -> Callable[[OpenAxes], None]:
    """The test on each mesh that the job has ranks for, one after the other."""

    def on_each(opened: OpenAxes) -> None:
        for shape in opened.shapes():
            test(opened, shape)

    on_each.__name__, on_each.__doc__ = test.__name__, test.__doc__
    return pytest.mark.mpi(on_each)


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

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.channels, self.rows.size, self.cols.size

    def image(self, seed: int) -> torch.Tensor:
        """Whole numbers from -3 to 3, the same on every rank."""
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(-3, 4, self.shape, generator=draw).to(self.dtype)

    def owned(self, at: MeshPosition) -> tuple[slice, ...]:
        return slice(None), slice(None), self.rows.owned(at.row).slice, self.cols.owned(at.col).slice

    def window(self, at: MeshPosition) -> tuple[slice, ...]:
        """Where the window lies in an image with a margin on all sides."""
        row = self.row_windows[at.row] if self.row_windows else self.rows.owned(at.row)
        col = self.col_windows[at.col] if self.col_windows else self.cols.owned(at.col)
        return slice(None), slice(None), row.shift(MARGIN).slice, col.shift(MARGIN).slice

    def exchange(self, at: MeshPosition) -> BlockExchange | None:
        return block_exchange(
            plan_exchange(self.rows, self.row_windows, at.row) if self.row_windows else None,
            plan_exchange(self.cols, self.col_windows, at.col) if self.col_windows else None,
            (at.row, at.col),
        )

    def with_margin(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x_BCHW, (MARGIN,) * 4, value=self.fill)

    def block(self, x_BCHW: torch.Tensor, at: MeshPosition) -> torch.Tensor:
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return x_BCHW[self.owned(at)].clone(memory_format=layout)

    def weights(self, at: MeshPosition, seed: int) -> torch.Tensor:
        """What the rank at `at` multiplies its window by."""
        shape = [part.stop - part.start for part in self.window(at)[2:]]
        draw = torch.Generator().manual_seed(1000 * seed + 100 * at.row + at.col)
        return torch.randint(-3, 4, (*self.shape[:2], *shape), generator=draw).to(self.dtype)


@st.composite
def cases(draw: st.DrawFn, shape: tuple[int, int]) -> Case:
    """Any widths on any side of any rank: none, a crop, several hops, beyond the image, all of it elsewhere."""
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
    )


def expected_gradient(case: Case, axes: Axes, seed: int) -> torch.Tensor:
    """The adjoint on the undivided image: every rank's weights added where its window lies."""
    total_BCHW = replace(case, fill=0.0).with_margin(torch.zeros(case.shape, dtype=case.dtype))
    for row in range(axes.shape.rows):
        for col in range(axes.shape.cols):
            at = MeshPosition(0, row, col)
            total_BCHW[case.window(at)] += case.weights(at, seed)
    return total_BCHW[:, :, MARGIN:-MARGIN, MARGIN:-MARGIN]


def check_exchange(case: Case, opened: OpenAxes, axes: Axes, seed: int = 1) -> None:
    """Forward, backward and the adjoint identity. Collective over the job."""
    fault = None
    at = axes.position
    if at is not None:
        x_BCHW = case.block(case.image(seed), at).requires_grad_()
        weights_BCHW = case.weights(at, seed)
        window_BCHW = exchanged(x_BCHW, case.exchange(at), axes, case.fill)
        (dx_BCHW,) = torch.autograd.grad(window_BCHW, x_BCHW, weights_BCHW)
        image_BCHW, gradient_BCHW = case.image(seed), expected_gradient(case, axes, seed)[case.owned(at)]
        if not torch.equal(window_BCHW, case.with_margin(image_BCHW)[case.window(at)]):
            fault = "the window is not that of the image"
        elif not torch.equal(dx_BCHW, gradient_BCHW):
            fault = "the gradient is not the sum of the windows' gradients"
        # A gradient that nobody else has, which is added to where it lies.
        layout = torch.channels_last if case.channels_last else torch.contiguous_format
        owned_BCHW = exchanged(x_BCHW, case.exchange(at), axes, case.fill, owned=True)
        own_BCHW = weights_BCHW.clone(memory_format=layout)
        (dx_owned_BCHW,) = torch.autograd.grad(owned_BCHW, x_BCHW, own_BCHW)
        if case.exchange(at) is not None and not torch.equal(dx_owned_BCHW, gradient_BCHW):
            fault = "a gradient that is added to where it lies is not the sum"
        elif not torch.equal(x_BCHW, case.block(image_BCHW, at)):
            fault = "the block was written over"
        inside_BCHW = torch.where(torch.isfinite(window_BCHW), window_BCHW.detach(), 0)
        if case.fill:  # the part of F that is linear
            is_filled = case.with_margin(torch.zeros(case.shape))[case.window(at)] != 0
            inside_BCHW = torch.where(is_filled, 0, inside_BCHW)
        products = torch.tensor([(inside_BCHW * weights_BCHW).sum(), (x_BCHW.detach() * dx_BCHW).sum()]).double()
        axes.image.all_reduce_sum(products).wait()
        if products[0] != products[1]:
            fault = f"<Fx, y> = {products[0]} but <x, F*y> = {products[1]}"
    opened.agree(fault)


@mesh_shapes
def test_windows_gradients_and_the_adjoint_identity(opened: OpenAxes, shape: tuple[int, int]) -> None:
    axes = opened.of(*shape)

    for_all(opened, cases(shape), lambda case: check_exchange(case, opened, axes), 12)


def thin(rows: int, cols: int, before: int, after: int, dtype: torch.dtype = torch.float64) -> Case:
    """Uneven blocks with the same halo everywhere, cut at the image's ends."""
    edges = (0, 3, 4, 9, 11)
    parts = [Partition((*edges[:n], 12)) for n in (rows, cols)]
    wanted = [tuple(b.expand(before, after) for b in p.blocks) for p in parts]
    return Case(*parts, *wanted, dtype=dtype)


@pytest.mark.mpi
@pytest.mark.nine
@pytest.mark.parametrize(
    ("before", "after", "dtype"),
    [(1, 1, torch.float32), (2, 0, torch.float64), (0, 3, torch.float64), (7, 5, torch.float32)],
)
def test_thin_halos_and_those_of_several_hops(opened: OpenAxes, before: int, after: int, dtype: torch.dtype) -> None:
    """7 and 5 pixels reach over whole blocks of 1, 2 and 3."""
    for shape in opened.shapes():
        check_exchange(thin(*shape, before, after, dtype), opened, opened.of(*shape))


@every_shape
def test_traffic_is_what_the_plan_says(opened: OpenAxes, shape: tuple[int, int]) -> None:
    """Messages and bytes forward, and as many backward; none where each rank wants its own."""
    axes = opened.of(*shape)
    at, traffic, fault = axes.position, axes.point_to_point.meter, None
    case = thin(*shape, 1, 1)
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


@every_shape
def test_a_block_that_does_not_lie_in_one_piece(opened: OpenAxes, shape: tuple[int, int]) -> None:
    """A view of a larger tensor, and a gradient that is one number seen everywhere."""
    axes = opened.of(*shape)
    case, at, fault = thin(*shape, 2, 1), axes.position, None
    if at is not None:
        larger_BCHW = torch.nn.functional.pad(case.block(case.image(3), at), (1, 2, 3, 1), value=99.0)
        height, width = case.rows.owned(at.row).size, case.cols.owned(at.col).size
        x_BCHW = larger_BCHW[:, :, 3 : 3 + height, 1 : 1 + width].requires_grad_()
        window_BCHW = exchanged(x_BCHW, case.exchange(at), axes)
        (dx_BCHW,) = torch.autograd.grad(window_BCHW.sum(), x_BCHW)
        seen = [[0] * p.size for p in (case.rows, case.cols)]
        for counts, wanted in zip(seen, (case.row_windows, case.col_windows), strict=True):
            for i in range(len(counts)):
                counts[i] = sum(w.start <= i < w.stop for w in wanted)
        rows, cols = (torch.tensor(counts, dtype=torch.float64) for counts in seen)
        if not torch.equal(window_BCHW, case.with_margin(case.image(3))[case.window(at)]):
            fault = "the window is not that of the image"
        elif not torch.equal(dx_BCHW, (rows[:, None] * cols[None])[None, None][case.owned(at)]):
            fault = "the gradient does not count the windows that see each pixel"
    opened.agree(fault)
