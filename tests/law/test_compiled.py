"""The law of compiled networks: torch.compile changes no output and no gradient; `test_steps.py` has it on ranks.

Traced and differentiated as for a GPU, by torch's own kernels in float64 (backend aot_eager), so that nothing but the
order of sums may differ; generated C++ kernels run each night, where there is a compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.conftest import NIGHTLY
from tests.law.cases import one_rank
from tests.law.steps import check
from tests.law.test_devices import KINDS
from tiledseg.errors import ConfigError
from tiledseg.models import compiled

BACKENDS = ["aot_eager", *(["inductor"] if NIGHTLY else [])]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(KINDS) if NIGHTLY else list(KINDS)[::4])
def test_steps_of_every_kind(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout drops the same channels."""
    monkeypatch.setattr(compiled, "INDUCTOR", backend)
    check(replace(KINDS[name], compiles=True), one_rank(), bound=1e-12)
    assert not torch._dynamo.utils.counters["graph_break"], "it is one graph"


def test_without_a_compiler_it_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU by a kernel that is made beforehand: triton alone does not suffice."""
    from torch._inductor import config

    def fail(function: object) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nMore lines")

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    monkeypatch.setattr(torch, "compile", fail)
    gpu = r"^[^\n]*for cuda:0 \(Failed to find C compiler\..*\); install triton and a C comp[^\n]*$"
    for device, words in (("cpu", r"no C\+\+ compiler; install g\+\+, or give off"), ("cuda:0", gpu)):
        with pytest.raises(ConfigError, match=words):
            compiled.check_compiler(torch.device(device))
