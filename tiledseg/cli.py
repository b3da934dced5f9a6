"""`tiledseg COMMAND ...`, or `python -m tiledseg COMMAND ...`: the entry of all commands."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from tiledseg.commands import entry

COMMANDS = {
    "plan": "memory, tiles, halo mode, GPUs and time, before any job",
    "scene": "write a synthetic satellite scene and its labels",
    "tile": "cut rasters into an HDF5 tile store",
    "train": "train a network; alone, or under mpirun, srun, jsrun, torchrun",
    "predict": "map a raster with a trained network",
    "evaluate": "score a class map against its labels",
    "export": "write a trained network as ONNX (QGIS), .pt2 or STAC-MLM",
    "report": "make the page of a run, one HTML file: scores, curves, pictures",
    "doctor": "show the ranks of a job, and measure all-reduces",
}


def enter() -> NoReturn:
    """Run the command of the process's arguments, and end the process with its exit code."""
    entry.enter("tiledseg.cli")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named by `argv[0]`, and return its exit code; 2 for an unknown command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return importlib.import_module(f"tiledseg.{words[0]}").main(words[1:])
    from tiledseg.commands.parser import run

    return run(lambda: _without_command(words))


def _without_command(words: Sequence[str]) -> None:
    """Answer --help and --version. Raise ConfigError for other arguments."""
    import argparse

    from tiledseg.commands.parser import Parser
    from tiledseg.errors import VERSION

    width = max(map(len, COMMANDS))
    parser = Parser(
        prog="tiledseg",
        usage="tiledseg COMMAND [OPTION ...]",
        description="Train segmentation networks on images too large for one GPU, and map rasters.",
        epilog="\n".join(
            ["commands (each takes --help):", *(f"  {name:{width}}  {what}" for name, what in COMMANDS.items())]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tiledseg {VERSION}")
    if words and not words[0].startswith("-"):
        import difflib

        from tiledseg.config.checks import shown

        near = " or ".join(difflib.get_close_matches(words[0], COMMANDS, n=2, cutoff=0.5))
        parser.error(f"there is no command '{shown(words[0])}'; give {near or 'one of ' + ', '.join(COMMANDS)}")
    parser.parse_args(words)
    parser.error(f"give a command: {', '.join(COMMANDS)}")
