"""The halo mode, and the fusion depth of layer mode, of the least predicted time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiledseg.config.parallel import HALO_MODES
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import WHOLE, layer_windows
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.prices import Prices
from tiledseg.planning.modes.mode_cost import ModeCost, layer_ranks
from tiledseg.planning.step.halo_traffic import SentBytes

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, WHOLE)  # of fusion; depths between them change little


def choose_fusion(
    graph: Graph, rows: Partition, cols: Partition, bands: int, value_bytes: int, machine: Machine
) -> int:
    """Return the fusion depth (1, 2, ..., WHOLE) whose training step takes the least predicted time; the smallest of
    equals. `rows`, `cols`: the cut of the input. Raises GeometryError where it cannot be. The same on every rank.
    """
    if rows.parts * cols.parts == 1:
        return 1

    prices = Prices(graph, bands, value_bytes, machine, rows.parts * cols.parts)

    def seconds(fusion: int) -> float:
        ranks = layer_ranks(graph, rows, cols, fusion, bands, value_bytes)
        return max(rank.time(prices).seconds for rank in ranks)

    dims = (graph, rows), (graph.along_columns, cols)
    halos = max(sum(at.exchanges for at in layer_windows(each, partition)) for each, partition in dims)
    return min((depth for depth in DEPTHS if depth in (1, WHOLE) or depth < halos), key=seconds)


def choose_mode(
    costs: Sequence[ModeCost],
    memory: int | None = None,
    exact: Sequence[str] = HALO_MODES,
    finer: Callable[[], str] = lambda: "use a finer grid",
) -> tuple[ModeCost | None, str]:
    """Choose the mode of the least predicted time among the `exact` ones that fit `memory` bytes a rank, and say why.

    Without `memory` all fit; `finer` names a grid that would. The first of equals; None, and the reason, where there is
    none.
    """
    candidates = [cost for cost in costs if cost.mode in exact]
    fitting = [cost for cost in candidates if memory is None or cost.memory <= memory]
    if not costs:
        return None, "no mode takes a tile whole on this mesh"
    if not candidates:
        return None, "no mode can compute this exactly on this mesh; use fewer ranks an image, or another norm"
    if not fitting:
        least = min(candidates, key=lambda cost: cost.memory)
        return None, (
            f"no mode fits {memory} bytes a rank: {label(least)} needs least, {least.memory}; {finer()} and more "
            "ranks an image, or a lower precision"
        )
    chosen = min(fitting, key=lambda cost: cost.seconds)
    if all((cost.work, cost.traffic.step) == (chosen.work, SentBytes()) for cost in costs):
        return chosen, "all modes are the same here: each computes the same tiles, nothing twice, and sends nothing"
    compared = []
    for cost in costs:
        fault = " (not exact)" if cost not in candidates else "" if cost in fitting else " (does not fit)"
        if cost is not chosen:
            compared.append(f"{label(cost)} {1000 * cost.seconds:.4g} ms{fault}")
    against = f", against {', '.join(compared)}" if compared else ""
    return chosen, f"{label(chosen)} takes the least predicted time, {1000 * chosen.seconds:.4g} ms{against}"


def fusion_word(fusion: int) -> int | str | None:
    """Return the depth; "whole" for one exchange of the input; None for 0, of the other modes."""
    return "whole" if fusion >= WHOLE else fusion or None


def mode_words(mode: str, fusion: int | str | None) -> str:
    """Return the mode with its fusion (as `fusion_word` gives it), where an exchange serves several layers."""
    return mode if fusion in (None, 1) else f"{mode}, fusion {fusion}"


def label(cost: ModeCost) -> str:
    """Return the mode of a cost in words."""
    return mode_words(cost.mode, fusion_word(cost.fusion))
