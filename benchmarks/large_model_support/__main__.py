"""The tables of large model support, in one run: the disk, the cost of each way, and what fits a limit of memory.

    python -m benchmarks.large_model_support --channels 32 --size 256
    python -m benchmarks.large_model_support --small          # a few seconds, what the tests run

Ratios are of steps side by side in one process, round by round. Losses of all ways are compared, to the last bit.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.large_model_support.disk import dd_rates
from benchmarks.large_model_support.fits import tried
from benchmarks.large_model_support.overhead import HEADING, overhead
from benchmarks.large_model_support.trl_way import trl_way
from tiledseg.memory.file_store import disk_rates

MEBI = 1 << 20


def disk_lines(store: Path, size: int) -> list[str]:
    written, read = dd_rates(store, size)
    ours_written, ours_read = disk_rates(store, size)
    return [
        f"dd, direct: writes {written / 1e6:.0f} MB/s, reads {read / 1e6:.0f} MB/s",
        f"store: writes {ours_written / 1e6:.0f} MB/s ({ours_written / written:.0%} of dd), "
        f"reads {ours_read / 1e6:.0f} MB/s ({ours_read / read:.0%} of dd)",
    ]


def fit_lines(levels: int, channels: int, limit: int, tries: list[tuple[int, int]], store: Path) -> list[str]:
    lines = [f"U-Net({levels}, {channels}) under {limit // MEBI} MiB, budget a fifth of it", ""]
    lines += ["| size | batch | s a step without | s a step with |", "| --- | --- | --- | --- |"]
    for size, batch in tries:
        both = [tried(levels, channels, size, batch, limit, budget, store) for budget in (None, limit // 5)]
        lines.append(f"| {size} | {batch} | " + " | ".join("no" if s is None else f"{s:.2f}" for s in both) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, default=4)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=int, default=1024, help="MiB, of the table of what fits")
    parser.add_argument("--fits", type=int, nargs="*", default=[256, 384, 512], help="sizes tried, at batches 1 and 2")
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--small", action="store_true")
    a = parser.parse_args()
    if a.small:
        a.levels, a.channels, a.size, a.rounds, a.limit, a.fits = 3, 8, 128, 1, 48, []
    print("\n".join(disk_lines(a.store, (64 if a.small else 512) * MEBI)))
    trl = trl_way()
    print(trl.note)
    kept, rows = overhead(a.levels, a.channels, a.size, a.store, a.rounds, trl.way)
    print(f"\nU-Net({a.levels}, {a.channels}), {a.size} px: autograd keeps {kept / 1e6:.0f} MB\n\n{HEADING}")
    print("\n".join(row.line() for row in rows))
    if a.fits:
        tries = [(size, batch) for size in a.fits for batch in (1, 2)]
        print("\n" + "\n".join(fit_lines(a.levels, a.channels, a.limit * MEBI, tries, a.store)))


if __name__ == "__main__":
    main()
