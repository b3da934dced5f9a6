"""What sharing an image costs a rank besides its messages: a block as one of two, over the same pixels alone.

    python -m benchmarks.spatial.without_messages [--height 1024] [--width 2048] [--pairs 7]

One process of one thread, seconds of that thread: forward, loss and backward of a U-Net on a block whose messages go
nowhere, so that what would arrive has no meaning, between two such passes of the network itself on the block.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn.functional import cross_entropy

from benchmarks.spread import Spread, ratios
from tiledseg.architecture.unet import UNet
from tiledseg.comm.axes import serial_axes
from tiledseg.comm.transports.point_to_point import SerialPointToPoint
from tiledseg.comm.transports.work import DoneWork, Work
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.mesh_shape import MeshShape
from tiledseg.models.network import build_modules
from tiledseg.spatial.network import SpatialNetwork
from tiledseg.system.freed_memory import keep_freed_memory


class Nowhere(SerialPointToPoint):
    """Messages that are neither sent nor received."""

    def start(self, outgoing: object, incoming: object) -> Work:
        return DoneWork()


def seconds_of(forward: Callable[[], torch.Tensor], labels_BHW: torch.Tensor) -> float:
    """Of the thread, for a step."""
    begun = time.thread_time()
    cross_entropy(forward(), labels_BHW).backward()
    return time.thread_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=7)
    given = parser.parse_args()
    keep_freed_memory(os.environ)
    torch.set_num_threads(1)
    unet = UNet(given.levels, base_channels=given.channels)
    network = build_modules(unet, seed=0).train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    axes = replace(serial_axes(), shape=MeshShape(1, 2, 1), point_to_point=Nowhere())
    shared = SpatialNetwork(network, axes)
    rows, cols = Partition.even(2 * given.height, 2), Partition.even(given.width, 1)
    x_BCHW = torch.randn(1, unet.bands, given.height, given.width).contiguous(memory_format=torch.channels_last)
    labels_BHW = torch.zeros(1, given.height, given.width, dtype=torch.long)
    alone, between = list[float](), list[float]()
    for _ in range(given.pairs + 1):
        first = seconds_of(lambda: network(x_BCHW), labels_BHW)
        between.append(seconds_of(lambda: shared(x_BCHW, rows, cols), labels_BHW))
        alone.append((first + seconds_of(lambda: network(x_BCHW), labels_BHW)) / 2)
    told = Spread.of(alone[1:]), Spread.of(between[1:]), ratios(between[1:], alone[1:])
    print("alone {} s, as one of two {} s, {} times as long".format(*told))


if __name__ == "__main__":
    main()
