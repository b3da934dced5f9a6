from __future__ import annotations

from tests.planning.asked import asked_of
from tiledseg.architecture.unet import UNet
from tiledseg.planning.answer.report import formula, plan


def test_the_papers_setting() -> None:
    planned = plan(asked_of((10000, 10000), UNet(), (8, 8), images=100, gpus=1200))
    answer, tiling = planned.values, planned.tiling
    assert tiling is not None
    assert answer["paper"] == {
        "shrink": 2,
        "halo": 92,
        "tile": 1250,
        "context": 1434,
        "efficiency": 1.3161,
        "efficiency_linear": 1.2944,
    }
    exact = answer["exact"]
    assert (exact["alignment"], exact["halo_minimum"], exact["halo"], exact["grid"]) == (16, 94, 96, [8, 8])
    assert (exact["core_max"], exact["context_max"], exact["tiles"]) == ([1264, 1264], [1440, 1440], 64)
    computed = sum(t.context.area for t in tiling.tiles)
    assert exact["efficiency"] == round(computed / 10**8, 4)
    cluster = answer["cluster"]
    assert (cluster["gpus_per_image"], cluster["nodes_per_image"]) == (64, 10.67)
    assert (cluster["rounds"], cluster["idle_gpus_last_round"], cluster["utilisation"]) == (6, 800, 0.8889)


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
