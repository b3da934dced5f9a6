"""The sliding window that stands in for MONAI's: each pixel the mean of the windows that see it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.whole_scene.sliding_window_job import AT_ONCE, WINDOW, sliding_window, starts

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize(
    ("side", "expected"),
    [(512, [0]), (513, [0, 1]), (896, [0, 384]), (1024, [0, 384, 512]), (1300, [0, 384, 768, 788])],
)
def test_windows_begin_at_multiples_of_the_interval_and_end_with_the_image(side: int, expected: list[int]) -> None:
    assert starts(side) == expected


def test_a_pixel_is_the_mean_of_the_windows_that_see_it() -> None:
    sides = (513, 900)
    x_BCHW = torch.randn(1, 1, *sides, generator=torch.Generator().manual_seed(0))
    calls: list[int] = []

    def own_mean(windows_BCHW: torch.Tensor) -> torch.Tensor:
        calls.append(len(windows_BCHW))
        return windows_BCHW.mean((2, 3), keepdim=True).expand(-1, 2, WINDOW, WINDOW)

    found = sliding_window(x_BCHW, own_mean)
    rows, cols = starts(sides[0]), starts(sides[1])
    x_HW = x_BCHW[0, 0].double().numpy()
    places = [(r, c) for r in rows for c in cols]
    for at in ((0, 0), (200, 450), (512, 899)):
        seeing = [(r, c) for r, c in places if r <= at[0] < r + WINDOW and c <= at[1] < c + WINDOW]
        mean = np.mean([x_HW[r : r + WINDOW, c : c + WINDOW].mean() for r, c in seeing])
        assert found[0, :, *at].tolist() == pytest.approx([mean] * 2, abs=1e-6)
    assert calls == [AT_ONCE, len(places) - AT_ONCE]
