"""The tables of large model support, in one run: the disk, and the cost of each way.

    python -m benchmarks.large_model_support --channels 32 --size 256
    python -m benchmarks.large_model_support --small          # a few seconds, what the tests run

Ratios are of steps side by side in one process, round by round. Losses of all ways are compared, to the last bit.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.large_model_support.overhead import HEADING, overhead
from tiledseg.memory.file_store import FileStore
from tiledseg.memory.mover import store_rates

MEBI = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, default=4)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--small", action="store_true")
    a = parser.parse_args()
    if a.small:
        a.levels, a.channels, a.size, a.rounds = 3, 8, 128, 1
    size = (64 if a.small else 512) * MEBI
    rates = store_rates(FileStore(a.store, 2 * size), size)
    print(f"store: writes {rates.written / 1e6:.0f} MB/s, reads {rates.read / 1e6:.0f} MB/s")
    kept, rows = overhead(a.levels, a.channels, a.size, a.store, a.rounds)
    print(f"\nU-Net({a.levels}, {a.channels}), {a.size} px: autograd keeps {kept / 1e6:.0f} MB\n\n{HEADING}")
    print("\n".join(row.line() for row in rows))


if __name__ == "__main__":
    main()
