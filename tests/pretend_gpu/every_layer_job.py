"""Networks of every layer, and traced ones, forward and backward with deterministic kernels, on the pretend GPU.

Prints, for each network, `same` and how far its outputs and gradients are from the CPU's, or `FAILED` and the error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import nn

from tests.law.every_layer import EveryLayer, ForeignLayers
from tests.tracing.cases import WRITTEN
from tiledseg.errors import first_line
from tiledseg.execution.precision import make_deterministic
from tiledseg.models.network import build_modules


def networks() -> Iterator[tuple[str, Callable[[], nn.Module], int]]:
    """Each network's name, what makes it, and its bands."""
    for described in (EveryLayer, ForeignLayers):
        for whole in (False, True):
            yield f"{described.__name__} {whole}", lambda d=described, w=whole: build_modules(d(w), seed=1), 2
    for name, source in WRITTEN.items():
        yield name, source.network, source.bands


def gradients(network: nn.Module, device: str, bands: int) -> list[torch.Tensor]:
    network = copy.deepcopy(network).double().to(device)
    x = torch.randn(2, bands, 64, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = network(x.to(device).to(memory_format=torch.channels_last))
    outputs = [found] if isinstance(found, torch.Tensor) else list(found)
    sum(output.square().mean() for output in outputs).backward()
    parameters = [p.grad for p in network.parameters() if p.grad is not None]
    return [tensor.detach().cpu() for tensor in (*outputs, *parameters)]


def main() -> None:
    for name, make, bands in networks():
        try:
            torch.manual_seed(1)
            torch.use_deterministic_algorithms(False)
            network = make()
            for module in network.modules():
                if "dropout" in type(module).__name__.lower():
                    module.eval()
            make_deterministic(True)
            pair = [gradients(network, device, bands) for device in ("cuda", "cpu")]
            worst = max(float((a - b).abs().max() / (b.abs().max() + 1e-6)) for a, b in zip(*pair, strict=True))
            print(f"{'same' if worst < 1e-9 else 'FAILED'} {worst:.1e} | {name}", flush=True)
        except Exception as error:
            print(f"FAILED {type(error).__name__} {first_line(error)} | {name}", flush=True)


if __name__ == "__main__":
    main()
