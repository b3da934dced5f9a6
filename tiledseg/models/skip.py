"""Skips of a flat sequence: who stashes, who pops, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from tiledseg.errors import ConfigError
from tiledseg.geometry.layer import Layer, PopConcatenate, Stash


def skip_faults(layers: Sequence[Layer]) -> list[str]:
    """Every fault of the skips of a sequence, one line each; empty where it is sound.

    A skip is stashed once, before it is popped; it may be popped by several layers, and by one at least.
    """
    faults: list[str] = []
    stashed: dict[str, str] = {}
    popped: set[str] = set()
    names: set[str] = set()
    for layer in layers:
        if layer.name in names:
            faults.append(f"two layers are named '{layer.name}'")
        names.add(layer.name)
        if isinstance(layer, Stash):
            if layer.skip in stashed:
                faults.append(f"'{layer.name}' stashes '{layer.skip}', which '{stashed[layer.skip]}' stashed already")
            stashed[layer.skip] = layer.name
        elif isinstance(layer, PopConcatenate):
            if layer.skip not in stashed:
                faults.append(f"'{layer.name}' pops '{layer.skip}', which no layer before it stashes")
            popped.add(layer.skip)
    unpopped = [(skip, name) for skip, name in stashed.items() if skip not in popped]
    faults += [f"'{name}' stashes '{skip}', which no layer pops" for skip, name in unpopped]
    return faults


def verify_skips(layers: Sequence[Layer]) -> None:
    """Raise ConfigError that lists every fault of the skips."""
    faults = skip_faults(layers)
    if faults:
        raise ConfigError(f"the network's skips do not fit: {'; '.join(faults)}")


def last_pops(layers: Sequence[Layer]) -> dict[str, str]:
    """For each skip, the layer that pops it last: behind it the skip can be let go."""
    return {layer.skip: layer.name for layer in layers if isinstance(layer, PopConcatenate)}
