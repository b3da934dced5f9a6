r"""Our spatial layers against torch's: equality and time, the same line of JSON as the peers' programs.

    mpirun -n 4 python -m benchmarks.spatial.ours --workload unet --mesh 2 2 [--layout channels_last] [--transport gloo]

The timed step ends with the sum of the weights' gradients over the ranks, as the peers' does. `--layout` is that of
tensors in memory: channels_last, which the trainer uses, or contiguous, which the peers run with. DistDL's messages go
through MPI, ShardTensor's through Gloo: `--transport` is either.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tiledseg.comm.session import leave, run_on_mesh

if TYPE_CHECKING:
    from tiledseg.comm.mesh import Mesh

LAYOUTS = ("channels_last", "contiguous")


def main() -> int:
    """Takes its own flags out of the command line; the rest is what the peers' programs take."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0])
    parser.add_argument("--transport", choices=("gloo", "mpi"), default="gloo")
    given, sys.argv[1:] = parser.parse_known_args()

    def body(mesh: Mesh) -> None:
        from benchmarks.spatial.our_layers import measure  # torch comes after MPI, which the session has started

        measure(mesh, given.layout, __doc__ or "")

    return run_on_mesh(body, given.transport)


if __name__ == "__main__":
    leave(main())
