"""What is asked for in another way than it was made: assets and items of a run, names of outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiledseg import tile
from tiledseg.config.map_formats import Packing
from tiledseg.errors import ConfigError, RasterError
from tiledseg.inference.request import Request, each_image
from tiledseg.raster.composed import TIMES, VALID, Composed, stem_of
from tiledseg.raster.finding import expand_sources
from tiledseg.raster.lists import SourceRules


def test_assets_in_another_order_than_the_runs_are_refused() -> None:
    request = Request("", "", packing=Packing(), composing=SourceRules(("nir", "red")))
    with pytest.raises(ConfigError, match="in its order"):
        each_image(request, ["items.json"], {"output": "map.tif"}, SourceRules(("red", "nir")))


@pytest.mark.parametrize(
    ("dates", "times", "match"),
    [
        (["2024-04-10", "2024-06-04"], ("2024-04", "2024-04-10"), "is of data.times 2024-04 and 2024-04-10"),
        (
            ["2024-04-10", "2024-04-10"],
            ("2024-04", "2024-06"),
            "both of data.times 2024-04; remove one, or give longer ones",
        ),
    ],
)
def test_items_that_are_no_times_of_their_own(
    tmp_path: Path, dates: list[str], times: tuple[str, ...], match: str
) -> None:
    (tmp_path / "red.tif").touch()
    items = [
        {
            "type": "Feature",
            "stac_version": "1.0.0",
            "id": f"{date}-{number}",
            "assets": {"red": {"href": "red.tif"}},
            "properties": {"datetime": date, "grid:code": "a"},
        }
        for number, date in enumerate(dates)
    ]
    (tmp_path / "items.json").write_text(json.dumps({"type": "FeatureCollection", "features": items}))
    with pytest.raises(RasterError, match=match):
        expand_sources([str(tmp_path / "items.json")], "x", rules=SourceRules(("red",), times=times))


def test_masks_of_each_time_leave_an_image_its_name() -> None:
    label, files = "s2/north_{april,june}.tif", ["s2/north_april.tif", "s2/north_june.tif"]
    masked = tuple(Composed(file, VALID, (file, f"clouds/{file[3:]}")) for file in files)
    assert stem_of(str(Composed(label, TIMES, masked))) == stem_of(Composed(label, TIMES, tuple(files))) == "north"


@pytest.mark.parametrize(("name", "how"), [("t.zarr", "hdf5"), ("t.zarr/", "hdf5"), ("", "zarr"), ("t.h5", "zarr")])
def test_a_store_is_not_written_under_the_other_ones_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str, how: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tile.main(["--images", "a.tif", "--grid", "2", "--format", how, "--output", name]) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"error: --output is '{name}'")
    assert said.count("\n") == 1
