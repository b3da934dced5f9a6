"""`tiledseg export --checkpoint RUN --output net.onnx net.pt2 net.json`: a trained network for other programs."""

from __future__ import annotations

from tiledseg.commands.entry import enter

if __name__ == "__main__":
    enter("tiledseg.export")

import json
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiledseg.commands.options import parse
from tiledseg.commands.parser import Parser, command, flag_of, make_callable, refuse_given
from tiledseg.config.checks import Range, checked
from tiledseg.errors import ConfigError, require
from tiledseg.system.console import answer
from tiledseg.system.files import replacing
from tiledseg.system.outputs import check_outputs, whole

_NETWORKS, _CARD = (".onnx", ".pt2"), ".json"
_RANGES = {
    "tile": Range(1, 1 << 14, remedy=f"1 to {1 << 14} pixels"),
    "resolution": Range(0.0, 1e9, above=True, remedy="centimetres a pixel, above 0"),
    "tolerance": Range(0.0, 1.0, above=True, below=True, remedy="a number between 0 and 1, as 1e-4"),
}


def build_parser() -> Parser:
    purpose = "Write a trained network for other programs: docs/how-to/export.md."
    parser = Parser("tiledseg export", "--checkpoint runs/run --output net.onnx net.json", description=purpose)
    parser.add_argument("--checkpoint", required=True, help="a run's folder, or one checkpoint of it")
    which = "checkpoint of a run (default latest)"
    parser.add_argument("--which", choices=("latest", "best"), default="latest", help=which)
    kinds = ".onnx (with the keys of QGIS's Deepness), .pt2 (torch.export), .json (STAC-MLM item of the first of these)"
    parser.add_argument("--output", nargs="+", required=True, metavar="FILE", help=kinds)
    parser.add_argument("--tile", type=int, metavar="N", help="take tiles of N x N pixels only (default: of any size)")
    parser.add_argument("--resolution", type=float, metavar="CM", help="with .onnx: centimetres a pixel, for Deepness")
    tolerance = "largest difference of a file's probability from the network's (default 5e-5; the file says it)"
    parser.add_argument("--tolerance", type=float, metavar="P", help=tolerance)
    parser.add_argument("--build", metavar="PACKAGE.MODULE:FUNCTION", help="the code that builds the network, if any")
    return parser


@command
def main(words: Sequence[str]) -> None:
    """Write the files and print their paths."""
    _export(parse(build_parser(), words), answer)


@checked
def export(checkpoint: str | Path, output: str | Path | Sequence[str | Path], **flags: Any) -> None:
    """Write a trained network for other programs like `tiledseg export`: one file, or several of different kinds.

    `checkpoint`: a run's folder, or one checkpoint. `output`: names that end in .onnx, .pt2 or .json. `flags`: any
    other flag of the command: `which="best"`, `tile=512` (None: tiles of any size), `resolution` (centimetres a pixel,
    for .onnx), `tolerance` (the largest difference of a probability), `build` (the function of `model.build`). Raises
    InputError before anything is written.
    """
    files = [output] if isinstance(output, str | Path) else output
    _export(parse(build_parser(), (), {**flags, "checkpoint": checkpoint, "output": files}), lambda path: None)


make_callable(__name__, export)


def check_options(options: Namespace) -> None:
    """Raise ConfigError for unknown endings of outputs, numbers out of range, and missing packages."""
    kinds = [_ending(path) for path in options.output]
    for path, kind in zip(options.output, kinds, strict=True):
        if kind not in (*_NETWORKS, _CARD):
            raise ConfigError(f"--output is {path}; give names that end in {', '.join((*_NETWORKS, _CARD))}")
    if len(set(kinds)) < len(kinds):
        raise ConfigError(f"--output has {' and '.join(options.output)}: two of one kind; give each kind once")
    for name, allowed in _RANGES.items():
        if getattr(options, name) is not None:
            allowed.check(flag_of(name), getattr(options, name))
    if ".onnx" not in kinds:
        refuse_given(options, ("resolution",), "--output has no .onnx, the only format with it", "add one")
    if not set(kinds) & set(_NETWORKS):
        refuse_given(options, ("tolerance",), "--output has no .onnx or .pt2", "add one")
    if ".onnx" in kinds:
        require("--output of .onnx", "export", "onnx", "onnxscript", "onnxruntime")


def _ending(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _export(options: Namespace, say: Callable[[str], None]) -> None:
    check_options(options)
    from tiledseg.checkpoint.folder import checkpoint_files
    from tiledseg.inference import exports
    from tiledseg.inference.trained import load

    trained = load(options.checkpoint, options.build, options.which)
    advice = exports.TileAdvice(trained, options.tile)
    check_outputs(
        [whole("--output", path) for path in options.output], [*checkpoint_files(trained.checkpoint), *options.config]
    )
    networks = [path for path in options.output if _ending(path) != _CARD]
    described = (*networks, str(trained.checkpoint.path / "model.safetensors"))[0]
    for path in sorted(options.output, key=lambda path: _ending(path) == _CARD):  # the card last
        with replacing(path) as part:
            if _ending(path) == _CARD:
                href = os.path.relpath(described, Path(path).parent)
                item = exports.stac_item(trained, advice, href, _ending(described))
                part.write_text(json.dumps(item, indent=1, allow_nan=False) + "\n")
            else:
                tolerance = options.tolerance or exports.TOLERANCE
                exports.write_network(part, path, trained, advice, tolerance, options.resolution)
        say(path)
