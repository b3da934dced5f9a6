"""Each fault of `faults.py` can still be put in; `python -m tests.mutations` sees each of them caught."""

from __future__ import annotations

import pytest

from tests.comm.launching import PACKAGE, ROOT
from tests.mutations.faults import FAULTS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_put_in(fault: Fault) -> None:
    source = (PACKAGE / fault.file).read_text()
    assert source.count(fault.old) == 1, fault.file
    compile(source.replace(fault.old, fault.new), fault.file, "exec")
    assert all((ROOT / test.partition("::")[0]).exists() for test in fault.tests.split()), fault.tests


def test_there_are_forty_faults() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40
