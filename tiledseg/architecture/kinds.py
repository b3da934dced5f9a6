"""The kinds of networks, each by its word in a checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, cast

from tiledseg.architecture.foreign import ForeignNetwork
from tiledseg.architecture.gated_scnn import GatedSCNN
from tiledseg.architecture.network import Network
from tiledseg.architecture.residual_unet import ResidualUNet
from tiledseg.architecture.segnet import SegNet
from tiledseg.architecture.unet import UNet

KINDS: dict[str, type[Any]] = {"unet": UNet, "segnet": SegNet, "residual_unet": ResidualUNet, "gated_scnn": GatedSCNN}
"""A dataclass for each, whose fields are numbers, text, truth values, or tuples of these."""
SAVED: dict[str, type[Any]] = {**KINDS, "foreign": ForeignNetwork}
"""What a checkpoint may hold."""
FIRST = "unet"  # of what says no kind: all networks were U-Nets once


def described(network: Network) -> dict[str, Any]:
    """Return the network for JSON: its fields, and its kind unless that is the first. Raises TypeError for another
    class."""
    kind = next((word for word, each in SAVED.items() if type(network) is each), None)
    if kind is None:
        raise TypeError(f"no kind of network is {type(network).__name__}; add it to KINDS")
    return ({} if kind == FIRST else {"kind": kind}) | asdict(cast(Any, network))
