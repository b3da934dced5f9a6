"""Networks that nobody here wrote, each traced: exact, and where; or refused, and why.

    python -m benchmarks.foreign_networks [many | trained [EVERY]]

writes the table of benchmarks/foreign-networks.md; `many`: of the many networks, which takes an hour; `trained`: of
these (or every seventh, say) how far the graph in training mode, without dropout, is from the module, in outputs,
gradients and moved statistics. `tests/tracing/test_foreign.py` holds each to the law, the many where
`FOREIGN_NETWORKS=many`.
"""

from __future__ import annotations

import copy
import sys
from contextlib import suppress

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.foreign_networks.networks import MANY, NETWORKS, Foreign
from tiledseg.errors import ConfigError, GeometryError
from tiledseg.geometry.halo import minimum_halo, network_footprint
from tiledseg.planning.run.spread import measuring
from tiledseg.tracing.trace import trace


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its gradient, which it has."""
    assert tensor.grad is not None
    return tensor.grad


def trained(foreign: Foreign) -> str:
    """The largest relative difference of a graph from its module in training, in float64; or why there is none."""
    module = foreign.module()
    try:
        network = trace(copy.deepcopy(module), foreign.bands, foreign.outputs)
    except (ConfigError, GeometryError) as error:
        return f"refused: {_short(str(error))}"
    alignment = 32
    with suppress(GeometryError):  # of outputs that are smaller than the image
        alignment = network_footprint(network.graph).alignment
    sides = (max(64, alignment * times) for times in (2, 3))
    x_BCHW, runs = torch.randn(2, foreign.bands, *sides, dtype=torch.float64), list[dict[str, torch.Tensor]]()
    for each in (network, module):
        for part in each.modules():
            if "Drop" in type(part).__name__ or type(part).__name__.endswith(("Depth", "Dropout")):
                part.eval()
        leaf_BCHW = x_BCHW.clone().requires_grad_()
        made = [y for y in tree_leaves(each(leaf_BCHW)) if isinstance(y, torch.Tensor)]
        made = made if each is network or foreign.outputs is None else [made[k] for k in foreign.outputs]
        torch.stack([y.square().mean() for y in made]).sum().backward()
        found = {f"y{k}": y.detach() for k, y in enumerate(made)} | {"dx": grad_of(leaf_BCHW)}
        found |= {f"d{name}": grad_of(p) for name, p in each.named_parameters() if p.grad is not None}
        buffers = {name for name, _ in module.named_buffers()}
        runs.append(found | {f"s{name}": b.double() for name, b in each.named_buffers() if name in buffers})
    assert runs[0].keys() == runs[1].keys(), runs[0].keys() ^ runs[1].keys()
    kinds = {"y": "y", "d": "gradients", "s": "statistics"}
    worst = dict[str, float]()
    scale = max(float(each.norm()) for name, each in runs[1].items() if name[0] == "d")
    for name, expected in runs[1].items():
        length = max(float(expected.norm()), 1e-3 * scale * (name[0] == "d"), 1e-30)
        kind = kinds[name[0]]
        worst[kind] = max(worst.get(kind, 0.0), float((runs[0][name] - expected).norm()) / length)
    mode = "trained" if network.training else "mapped"
    return f"{mode}: " + ", ".join(f"{kind} {apart:.0e}" for kind, apart in worst.items())


def main() -> None:
    if sys.argv[1:2] == ["trained"]:
        every = int(sys.argv[2]) if sys.argv[2:] else 1
        for name in [*MANY][::every]:
            print(f"| {name} | {trained(MANY[name])} |", flush=True)
        return
    many = sys.argv[1:] == ["many"]
    print("| network | package | exact in | nodes | halo, alignment | or refused, since |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, foreign in (MANY if many else NETWORKS).items():
        try:
            print(_row(name, foreign), flush=True)
        except ImportError as error:
            print(f"left out: {name}: {error}")


def _row(name: str, foreign: Foreign) -> str:
    module = foreign.module()
    try:
        graph = trace(module, foreign.bands, foreign.outputs).graph
    except (ConfigError, GeometryError) as error:
        return f"| {name} | {foreign.package} | | | | {_short(str(error))} |"
    modes = ["mode layer" if measuring(graph, trains) else "all modes" for trains in (True, False)]
    where = modes[0] if modes[0] == modes[1] else f"{modes[0]} trained and {modes[1]} mapped"
    try:
        halo = f"{max(minimum_halo(graph))}, {network_footprint(graph).alignment}"
    except GeometryError:  # whose output is smaller than the image: its author resizes it outside
        halo = ""
    return f"| {name} | {foreign.package} | {where}; stages | {len(graph)} | {halo} | |"


def _short(reason: str) -> str:
    """The first refusal, in a table's cell."""
    first = reason.split("; (2)")[0].replace("|", "/")
    return first.removeprefix("the module cannot be computed exactly on tiles: (1) ")


if __name__ == "__main__":
    main()
