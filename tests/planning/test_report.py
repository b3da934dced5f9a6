from __future__ import annotations

from tests.planning.asked import asked_of
from tiledseg.architecture.unet import UNet
from tiledseg.planning.answer.report import formula, plan


def test_image_work_is_the_sum_over_tiles() -> None:
    planned, whole = (plan(asked_of((500, 700), UNet(4, base_channels=4), grid)) for grid in ((3, 2), (1, 1)))
    tiling, network, single = planned.tiling, planned.values["network"], whole.values["network"]
    assert tiling is not None
    assert network["multiply_adds_context"] == sum(layer["multiply_adds"] for layer in network["by_layer"])
    assert network["parameters"] == single["parameters"] == sum(layer["parameters"] for layer in network["by_layer"])
    # Convolutions cost the same for each pixel, so the work of an image grows as its contexts' pixels do.
    pixels = sum(t.context.area for t in tiling.tiles)
    assert network["multiply_adds_image"] * 504 * 704 == single["multiply_adds_image"] * pixels


def test_another_stride_has_the_formula_only() -> None:
    planned = formula(asked_of((1000, 1000), UNet(), (4, 4)), 2)
    assert set(planned.values) == {"paper", "omitted", "cluster"}
    assert "nothing is exact for stride 2" in " ".join(planned.text().split())
    assert planned.values["paper"]["shrink"] == (1000 * 1 + 3) / 2 - 1
