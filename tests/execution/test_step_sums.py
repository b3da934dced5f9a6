"""What the ranks of a step tell each other arrives under its name, whatever their number."""

from __future__ import annotations

import pytest

from tiledseg.comm.mesh import Mesh
from tiledseg.execution.agreement import RankFigures, StepSums, over_ranks


@pytest.mark.mpi
def test_sums_add_up_and_figures_stay_apart(mesh: Mesh) -> None:
    def sums_of(rank: int) -> StepSums:
        return StepSums(*(10.0 * place + rank for place in range(len(StepSums._fields))))

    def figures_of(rank: int) -> RankFigures:
        return RankFigures(2.0**40 + rank, 0.5 * rank, 3.0 + rank)

    ranks = range(mesh.size)
    found, each = over_ranks(sums_of(mesh.rank), figures_of(mesh.rank), mesh.communicator)
    assert found == tuple(map(sum, zip(*map(sums_of, ranks), strict=True)))
    assert found.stage_messages == sum(80.0 + rank for rank in ranks)
    assert each == tuple(map(figures_of, ranks))
