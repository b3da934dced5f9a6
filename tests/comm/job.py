"""A job that fails in the way its first argument names; started by test_session.py under real launchers."""

import os
import signal
import time

from tiledseg.comm.doing import doing, ticking
from tiledseg.comm.session import leave, run_on_mesh
from tiledseg.commands.parser import Parser, run
from tiledseg.errors import RasterError

STANDSTILLS = ("stop root", "turn", "busy")

parser = Parser(prog="job")
parser.add_argument("way")
parser.add_argument("--transport", default="auto")
parser.add_argument("--deadline", type=float, default=600.0)


def work(mesh, way: str) -> int | None:
    """Sums tensors until the last rank fails; where it does not, all return 0."""
    import torch

    from tiledseg.comm.collectives import Message
    from tiledseg.comm.point_to_point import PointToPoint

    x = torch.ones(100_000)
    mesh.communicator.all_reduce_sum(x).wait()
    if mesh.is_root:
        print(f"sum {x[0].item():.0f} over {mesh.transport} threads {torch.get_num_threads()}", flush=True)
    last = mesh.rank == mesh.size - 1
    if way == "stop early":
        return 75 if last else None
    if way == "fine":
        return None
    if way in STANDSTILLS:
        return stand_still(mesh, way, x)
    messages, y = PointToPoint(mesh.communicator), torch.empty_like(x)
    ring = [Message((mesh.rank + 1) % mesh.size, x)], [Message((mesh.rank - 1) % mesh.size, y)]
    for step in range(10_000_000):
        if last and step == 20:
            fail(way)
        if way == "kill in a ring":
            messages.start(*ring).wait()
        else:
            mesh.communicator.all_reduce_sum(x).wait()
    return 0


def fail(way: str) -> None:
    """What happens to the last rank while the others wait for it."""
    print(f"failing at {time.time()}", flush=True)
    if way == "input":
        raise RasterError("b.tif is truncated")
    if way == "crash":
        raise ValueError("boom")
    if way == "interrupt":
        raise KeyboardInterrupt
    if way.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)


def stand_still(mesh, way: str, x) -> None:
    """One rank stops, is stopped or turns forever while the others wait for it; in `busy` it works on and ticks."""
    one = 0 if way == "stop root" else mesh.size - 1
    for step in range(3):
        with doing("step %d", step):
            if mesh.rank == one and step == 2:
                print(f"failing at {time.time()}", flush=True)
                with doing("counting sheep"):
                    _hold_up(way)
            mesh.communicator.all_reduce_sum(x).wait()
    if mesh.is_root:
        print("done", flush=True)


def _hold_up(way: str) -> None:
    time.sleep(1.0)  # so that the others have heard what it does
    if way == "stop root":
        os.kill(os.getpid(), signal.SIGSTOP)
    while way == "turn":
        pass
    if way == "busy":
        for _ in ticking(range(50)):
            time.sleep(0.2)


def main() -> int:
    """Parses, then runs on a mesh."""
    arguments = parser.parse_args()
    return run_on_mesh(lambda mesh: work(mesh, arguments.way), arguments.transport, arguments.deadline)


if __name__ == "__main__":
    leave(run(main))
