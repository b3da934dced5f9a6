"""A switch in software whose frames arrive late, or never: for kernels that have no netem.

    python -m tests.hosts.poor_switch PORTS SECONDS SHARE

makes the interfaces port0, port1, ..., says "ready", and hands every frame on to all other ports SECONDS later, but for
a SHARE of them. The interfaces may be moved to other network namespaces; they end with the process.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADERS = 0x0002 | 0x1000  # IFF_TAP | IFF_NO_PI
_LARGEST_FRAME = 65536


def open_port(name: str) -> int:
    port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(port, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADERS))
    return port


def hand_on(ports: list[int], seconds: float, share: float) -> None:
    """Does not end by itself."""
    chance, number = random.Random(1), 0
    under_way: list[tuple[float, int, int, bytes]] = []  # due, in the order of arrival, from, frame
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for port in select.select(ports, [], [], wait)[0]:
            frame = os.read(port, _LARGEST_FRAME)
            number += 1
            if chance.random() >= share:
                heapq.heappush(under_way, (time.monotonic() + seconds, number, port, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, source, frame = heapq.heappop(under_way)
            for port in ports:
                if port != source:
                    _write(port, frame)


def _write(port: int, frame: bytes) -> None:
    """An interface that is not up yet, or is full, loses the frame, as a real one does."""
    try:
        os.write(port, frame)
    except OSError:
        return


if __name__ == "__main__":
    opened = [open_port(f"port{number}") for number in range(int(sys.argv[1]))]
    print("ready", flush=True)
    hand_on(opened, float(sys.argv[2]), float(sys.argv[3]))
