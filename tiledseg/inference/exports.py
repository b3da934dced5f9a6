"""The export of a trained network for other programs: pixels in, probabilities out, for any height and width.

The file includes normalisation and softmax. A program divides a raster's pixels by `SCALE` for every format, because
QGIS's Deepness always divides by 255.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiledseg.errors import VERSION, ConfigError, TiledsegError, first_line
from tiledseg.geometry.halo import network_footprint, round_up
from tiledseg.geometry.layers.declared import Crops
from tiledseg.inference.trained import Trained
from tiledseg.planning.run.spread import measuring
from tiledseg.raster.labels.classes import in_hex

SCALE = 255.0
"""Divisor of pixels before they enter an exported network."""
TOLERANCE = 5e-5
"""Default for the largest difference of a file's probability from the network's, in float32."""
METADATA = "tiledseg.json"
"""Name of the metadata among the extra files of a .pt2."""

_LEAST_TILE = 512
_MOST_SIDE = 1 << 16


class Scored(nn.Module):
    """A module from x_BCHW, pixels over `SCALE`, to probabilities of (B, classes, H, W), float32."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self.network = trained.network.float().eval()
        own = trained.normalization
        mean, std = (torch.tensor(each, dtype=torch.float64) / SCALE for each in (own.mean, own.std))
        self.register_buffer("mean", mean.float()[:, None, None])
        self.register_buffer("std", std.float()[:, None, None])

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        scores = self.network((x_BCHW - self.mean) / self.std)
        first_BKHW: torch.Tensor = scores[0] if isinstance(scores, tuple) else scores
        return first_BKHW.softmax(1)


class TileAdvice:
    """Advice for a program that cuts a raster into tiles. `side`: of a tile; outputs of the outer `halo` pixels are not
    exact. `fixed`: the file takes tiles of that side only. `percent`: overlap of two tiles, both halos, rounded up."""

    def __init__(self, trained: Trained, side: int | None) -> None:
        """Advise on tiles of `side` pixels (None: chosen here). Raise ConfigError for a side without an exact pixel, or
        no multiple of the alignment, and for a network that no overlap makes exact on separate tiles. Raise
        GeometryError or ConfigError if output and input differ in size."""
        graph = trained.network.graph
        for node in graph.nodes:
            if isinstance(node.layer, Crops):
                raise ConfigError(
                    "the network runs on crops of one size, untraced, which an exported file cannot blend; map with "
                    "predict, or export the module by torch.export"
                )
            if node.layer.asks_place:
                raise ConfigError(
                    f"'{node.name}' depends on the position in the whole image (align_corners=True, positions), which "
                    "a program that runs the file on tiles does not know; map with predict, or train without"
                )
        for node in measuring(graph, trains=False):
            raise ConfigError(
                f"'{node.name}' measures statistics of the whole image, but of a tile in a program that runs the file "
                "on tiles; map with predict, or train with a norm that is constant in maps (batch, pixel)"
            )
        footprint = network_footprint(graph)
        if footprint.mirror:
            raise ConfigError(
                "the network is not padded: it returns fewer pixels than it takes; export one of padding 'same'"
            )
        halo, alignment = max(footprint.before, footprint.after), footprint.alignment
        chosen = side or round_up(max(_LEAST_TILE, 8 * halo), alignment)
        if chosen % alignment or chosen <= 2 * halo:
            least = round_up(2 * halo + 1, alignment)
            raise ConfigError(
                f"--tile is {chosen}, but the network needs a multiple of {alignment} and a halo of {halo} a side; "
                f"give a multiple of {alignment}, {least} or more"
            )
        self.side, self.halo, self.alignment, self.fixed = chosen, halo, alignment, side is not None
        self.percent = -(-200 * halo // chosen)


def write_network(
    part: Path,
    path: str,
    trained: Trained,
    advice: TileAdvice,
    tolerance: float,
    resolution: float | None = None,
) -> None:
    """Write `part`, the temporary file of `path` (.onnx or .pt2), and read it back. The network takes any batch, and,
    unless `advice` fixes them, any height and width that are multiples of the alignment.

    Raises ConfigError if the format cannot express the network, TiledsegError if a probability of the file differs from
    the network's by more than `tolerance`.
    """
    x_BCHW = torch.zeros(2, trained.bands, advice.side, advice.side)
    dims: dict[int, Any] = {0: torch.export.Dim("batch", min=1, max=1024)}
    if not advice.fixed:
        side = max(2, 2 * advice.alignment)
        x_BCHW = torch.zeros(2, trained.bands, side, side + advice.alignment)
        for dim, name in ((2, "height"), (3, "width")):
            units = torch.export.Dim(f"{name}_units", min=1, max=_MOST_SIDE // advice.alignment)
            dims[dim] = advice.alignment * units if advice.alignment > 1 else units
    with _expressing("torch.export", "try --tile N, or export another network"):
        program = torch.export.export(Scored(trained), (x_BCHW,), dynamic_shapes={"x_BCHW": dims})
    own: dict[str, Any] = {
        "tiledseg_bands": trained.band_numbers,
        "tiledseg_pixels_over": SCALE,
        "tiledseg_halo": advice.halo,
        "tiledseg_alignment": advice.alignment,
        "tiledseg_tolerance": tolerance,
    }
    keys = {key: json.dumps(value) for key, value in own.items()}
    # The check runs on one tile of noise with the training's mean and deviation.
    side = advice.side if advice.fixed else round_up(2 * advice.halo + 1, advice.alignment) + advice.alignment
    mean, std = (torch.tensor(each)[:, None, None] for each in (trained.normalization.mean, trained.normalization.std))
    noise_BCHW = torch.randn(1, trained.bands, side, side, generator=torch.Generator().manual_seed(0))
    x_BCHW = ((mean + std * noise_BCHW) / SCALE).float()
    if path.lower().endswith(".onnx"):
        import onnxruntime

        with _expressing("ONNX", "export it as .pt2"):
            made: Any = torch.onnx.export(program, dynamo=True, verbose=False)
        model = made.model_proto  # the property makes a new one at each read
        for key, value in {**deepness_keys(trained, advice, resolution), **keys}.items():
            entry = model.metadata_props.add()
            entry.key, entry.value = key, value
        part.write_bytes(model.SerializeToString())
        session = onnxruntime.InferenceSession(part.read_bytes(), providers=["CPUExecutionProvider"])
        found_BKHW = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x_BCHW.numpy()})[0])
    else:
        data = io.BytesIO()
        torch.export.save(program, data, extra_files={METADATA: json.dumps(keys)})
        part.write_bytes(data.getvalue())
        found_BKHW = run_program(part, x_BCHW)
    with torch.inference_mode():
        wanted_BKHW = Scored(trained)(x_BCHW)
    gap = (found_BKHW - wanted_BKHW).abs().max().item() if found_BKHW.shape == wanted_BKHW.shape else float("inf")
    if not gap <= tolerance:
        remedy = "; give a larger --tolerance if that is enough" if gap < 1 else ""
        raise TiledsegError(
            f"{path} read back gives probabilities that are off by {gap:.1e}, more than --tolerance {tolerance:g}; "
            f"nothing was written{remedy}"
        )


def run_program(part: Path, x_BCHW: torch.Tensor) -> torch.Tensor:
    loaded = torch.export.load(io.BytesIO(part.read_bytes()))
    with torch.inference_mode():
        output: torch.Tensor = loaded.module()(x_BCHW)
    return output


@contextlib.contextmanager
def _expressing(program: str, remedy: str) -> Iterator[None]:
    """Silence one of torch's exporters. Turn its errors into a ConfigError."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        raise ConfigError(
            f"{program} cannot express this network ({type(error).__name__}: {first_line(error)}); {remedy}"
        ) from error
    finally:
        logging.disable(before)


_MLM = "https://stac-extensions.github.io/mlm/v1.4.0/schema.json"
_CLASSIFICATION = "https://stac-extensions.github.io/classification/v2.0.0/schema.json"
_KINDS = {
    ".onnx": ("application/octet-stream; framework=onnx; profile=onnx", "ONNX"),
    ".pt2": ("application/octet-stream; application=pytorch", "torch.export.save"),
    ".safetensors": ("application/octet-stream; application=safetensors", "safetensors"),
}


def deepness_keys(trained: Trained, advice: TileAdvice, resolution: float | None) -> dict[str, str]:
    """Return the metadata of an ONNX file for QGIS's Deepness, in JSON. `resolution`: cm a pixel.

    Deepness reads the tile size from `tile_size`, which its pages call `tiles_size`; the overlap is a percentage of it.
    Some versions normalise the pixels over 255: mean 0 and deviation 1 here, because the network normalises. A
    threshold and a smallest segment of 0 turn off Deepness's changes to a map.
    """
    keys: dict[str, Any] = {
        "model_type": "Segmentor",
        "class_names": {k: one.name for k, one in enumerate(trained.checkpoint.saved.label_map.classes)},
        "tile_size": advice.side,
        "tiles_size": advice.side,
        "tiles_overlap": advice.percent,
        "standardization_mean": [0.0] * trained.bands,
        "standardization_std": [1.0] * trained.bands,
        "seg_thresh": 0.0,
        "seg_small_segment": 0,
        **({} if resolution is None else {"resolution": resolution}),
    }
    return {key: json.dumps(value) for key, value in keys.items()}


def stac_item(trained: Trained, advice: TileAdvice, file: str, ending: str) -> dict[str, Any]:
    """Return a STAC item with the MLM extension for one file of the network. A .safetensors file takes normalised
    pixels and returns logits; the other formats include normalisation and softmax."""
    saved = trained.checkpoint.saved
    side, own = advice.side if advice.fixed else -1, ending == ".safetensors"
    classes = [
        {"value": k, "name": one.name, "description": one.name, "color_hint": in_hex(one.colour)[1:].upper()}
        for k, one in enumerate(saved.label_map.classes)
    ]
    media, artifact = _KINDS[ending]
    pairs = zip(trained.normalization.mean, trained.normalization.std, strict=True)
    scaling: list[dict[str, Any]] = [{"type": "z-score", "mean": mean, "stddev": std} for mean, std in pairs]
    if not own:
        scaling = [{"type": "scale", "value": SCALE}]
    shape = {"dim_order": ["batch", "bands", "height", "width"], "data_type": "float32"}
    properties = {
        "datetime": None,
        "start_datetime": "1900-01-01T00:00:00Z",
        "end_datetime": "9999-12-31T23:59:59Z",
        "description": f"Tiles: multiples of {advice.alignment} px, of which {advice.halo} px a side are a halo.",
        "mlm:name": trained.checkpoint.path.name,
        "mlm:architecture": saved.network.in_words,
        "mlm:tasks": ["semantic-segmentation"],
        "mlm:framework": "ONNX" if ending == ".onnx" else "PyTorch",
        "mlm:framework_version": torch.__version__,
        "mlm:total_parameters": sum(weight.numel() for weight in trained.network.parameters()),
        "mlm:pretrained": True,
        "mlm:accelerator_constrained": False,
        "mlm:input": [
            {
                "name": "pixels",
                "bands": [f"band {number}" for number in trained.band_numbers],
                "input": {"shape": [-1, trained.bands, side, side], **shape},
                "resize_type": None,
                "pre_processing_function": None,
                "value_scaling": scaling,
            }
        ],
        "mlm:output": [
            {
                "name": "scores" if own else "probabilities",
                "bands": [],
                "tasks": ["semantic-segmentation"],
                "result": {
                    "shape": [-1, trained.classes, side, side],
                    "dim_order": ["batch", "class", "height", "width"],
                    "data_type": "float32",
                },
                "classification:classes": classes,
                "post_processing_function": None,
            }
        ],
        "tiledseg:version": VERSION,
        "tiledseg:halo": advice.halo,
        "tiledseg:alignment": advice.alignment,
    }
    asset = {"href": file, "type": media, "roles": ["mlm:model", "mlm:weights"], "mlm:artifact_type": artifact}
    return {
        "type": "Feature",
        "stac_version": "1.0.0",
        "stac_extensions": [_MLM, _CLASSIFICATION],
        "id": trained.checkpoint.path.name,
        "geometry": None,
        "properties": properties,
        "links": [],
        "assets": {"model": asset},
    }
