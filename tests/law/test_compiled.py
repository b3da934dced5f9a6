"""The law of compiled networks: torch.compile changes no output and no gradient; `test_steps.py` has it on ranks.

Traced and differentiated as for a GPU, by torch's own kernels in float64 (backend aot_eager), so that nothing but the
order of sums may differ; generated C++ kernels run each night, where there is a compiler.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.conftest import NIGHTLY
from tests.law.cases import difference
from tiledseg.architecture.unet import UNet
from tiledseg.config.words import NORMS, UPSAMPLINGS
from tiledseg.errors import ConfigError
from tiledseg.models import compiled
from tiledseg.models.dropout import DropoutKey, set_dropout_key
from tiledseg.models.network import Tensors, build_modules

BACKENDS = ["aot_eager", *(["inductor"] if NIGHTLY else [])]
KINDS = [*((norm, "transposed") for norm in NORMS), *(("none", upsampling) for upsampling in UPSAMPLINGS[1:])]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("norm", "upsampling"), KINDS if NIGHTLY else KINDS[::4])
def test_outputs_and_gradients_of_every_kind(norm: str, upsampling: str, backend: str) -> None:
    """Dropout drops the same channels."""
    unet = UNet(2, 1, base_channels=8, norm=norm, upsampling=upsampling, dropout=0.3, bands=2, classes=3)
    network = build_modules(unet, seed=0).double().to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    set_dropout_key(network, DropoutKey(3, 1, 0))
    x_BCHW = torch.randn(1, 2, 16, 24, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    found = []
    for run in (
        compiled.CompiledNetwork(network, backend).run_nodes,
        lambda t: network.run_nodes(t, 0, len(network.graph)),
    ):
        tensors: Tensors = {0: x_BCHW}
        network.zero_grad(set_to_none=True)
        run(tensors)
        (y_BKHW,) = tensors.values()
        y_BKHW.square().sum().backward()
        found.append(
            {"output": y_BKHW.detach()} | {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
        )
    assert found[0].keys() == found[1].keys()
    assert not torch._dynamo.utils.counters["graph_break"], "it is one graph"
    assert difference(found[0], found[1]) < 1e-12


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
