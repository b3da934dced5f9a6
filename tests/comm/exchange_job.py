"""Ranks that exchange in a ring until the last is killed; the others print what they see and leave with code 3."""

from __future__ import annotations

import os
import signal

from tiledseg.comm.launch import detect
from tiledseg.comm.session import open_mesh
from tiledseg.errors import CommunicationError


def main() -> None:
    """Runs on each rank."""
    mesh = open_mesh(detect(os.environ), os.environ, "gloo")
    import torch

    from tiledseg.comm.transports.point_to_point import Message

    messages = mesh.communicator.point_to_point()
    right, left = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    sent, got = torch.ones(100_000), torch.empty(100_000)
    try:
        for step in range(10_000_000):
            if mesh.rank == mesh.size - 1 and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            messages.start([Message(right, sent)], [Message(left, got)]).wait()
    except CommunicationError as error:
        print(error, flush=True)
        os._exit(3)


if __name__ == "__main__":
    main()
