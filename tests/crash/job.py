"""A command of tiledseg of which one rank signals itself (KILL, USR1) at a chosen moment; started by the tests here.

`job.py NOTES SIGNAL MOMENT RANK COUNT train --config ...`: rank RANK gets SIGNAL as it meets MOMENT for the COUNT-th
time. It leaves the time of the signal in the folder NOTES, for those outside.
"""

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiledseg.comm.launch import detect
from tiledseg.comm.session import leave


def main() -> int:
    """Arms this rank, then runs the command."""
    notes, number, moment, rank, count = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5]
    command, arguments = sys.argv[6], sys.argv[7:]
    own = detect(os.environ).rank
    module = importlib.import_module(f"tiledseg.{command}")
    if own == int(rank):
        MOMENTS[moment](_countdown(int(count), signal.Signals[f"SIG{number}"], notes / "signalled"))
    return module.main(arguments)


def _countdown(count: int, number: signal.Signals, note: Path) -> Callable[[], None]:
    """Signals this process at its COUNT-th call."""
    left = [count]

    def meet() -> None:
        left[0] -= 1
        if left[0] == 0:
            note.write_text(str(time.time()))
            os.kill(os.getpid(), number)

    return meet


def _never(meet: Callable[[], None]) -> None:
    """Nothing happens."""


def _in_step(meet: Callable[[], None]) -> None:
    """Between the forward pass of a tile and its backward pass."""
    import mpi4py.MPI  # noqa: F401  (before torch)

    from tiledseg.training.objective import PixelTerm

    sums = PixelTerm.sums
    PixelTerm.sums = lambda *arguments: (meet(), sums(*arguments))[1]  # type: ignore[method-assign]


def _in_save(meet: Callable[[], None]) -> None:
    """Before a written checkpoint gets its name (tests.checkpoint.test_checkpoint.py has every other moment)."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and "/.partial-step" in str(arguments[0]):
            meet()

    sys.addaudithook(watch)


def _in_map(meet: Callable[[], None]) -> None:
    """Before a tile's pixels are written."""
    from tiledseg.raster import map_writer

    writer = map_writer.raster_writer

    @contextmanager
    def meeting(layout: Any) -> Iterator[Any]:
        with writer(layout) as write:
            yield lambda *arguments: (meet(), write(*arguments))[1]

    map_writer.raster_writer = meeting  # before `inference.mapping` imports it


def _in_publication(meet: Callable[[], None]) -> None:
    """Before a finished map gets its name. torch is imported here, which is after MPI only where MPI is up."""
    import mpi4py.MPI  # noqa: F401  (before torch)

    from tiledseg.inference import predictor

    publish = predictor.publish
    predictor.publish = lambda *arguments, **options: (meet(), publish(*arguments, **options))[1]  # type: ignore


def _in_chunk(meet: Callable[[], None]) -> None:
    """Before a chunk of a Zarr store is written."""
    from zarr.storage import LocalStore

    put = LocalStore.set

    async def counted(store: Any, key: str, *more: Any) -> None:
        if key[-1].isdigit():
            meet()
        await put(store, key, *more)

    LocalStore.set = counted  # type: ignore[method-assign]


MOMENTS = {
    "never": _never,
    "step": _in_step,
    "save": _in_save,
    "map": _in_map,
    "chunk": _in_chunk,
    "publication": _in_publication,
}

if __name__ == "__main__":
    leave(main())  # as the commands do: the interpreter's own end can meet a transport's thread that needs it
