"""Metadata of an exported network for other programs: Deepness's keys, and a STAC-MLM item."""

from __future__ import annotations

import json
from typing import Any

import torch

from tiledseg.inference.exports.exported import SCALE, TileAdvice
from tiledseg.inference.trained import Trained
from tiledseg.raster.labels.classes import in_hex
from tiledseg.version import VERSION

_MLM = "https://stac-extensions.github.io/mlm/v1.4.0/schema.json"
_CLASSIFICATION = "https://stac-extensions.github.io/classification/v2.0.0/schema.json"
_KINDS = {
    ".onnx": ("application/octet-stream; framework=onnx; profile=onnx", "ONNX"),
    ".pt2": ("application/octet-stream; application=pytorch", "torch.export.save"),
    ".safetensors": ("application/octet-stream; application=safetensors", "safetensors"),
}


def file_keys(trained: Trained, advice: TileAdvice, tolerance: float) -> dict[str, str]:
    """Return the keys of every file (JSON): bands to read, divisor of their pixels, halo and alignment in pixels, and
    the difference of probabilities that the export accepted."""
    keys: dict[str, Any] = {
        "tiledseg_bands": trained.band_numbers,
        "tiledseg_pixels_over": SCALE,
        "tiledseg_halo": advice.halo,
        "tiledseg_alignment": advice.alignment,
        "tiledseg_tolerance": tolerance,
    }
    return {key: json.dumps(value) for key, value in keys.items()}


def deepness_keys(trained: Trained, advice: TileAdvice, resolution: float | None) -> dict[str, str]:
    """Return the keys that QGIS's Deepness reads of an ONNX file, as it reads them (JSON). `resolution`: cm a pixel.

    Deepness takes a tile's size by `tile_size`, which its pages call `tiles_size`, and the overlap in percent of it.
    Some versions take a mean off the pixels over 255 and divide by a deviation: 0 and 1 here, since the normalisation
    is in the network. A threshold and a smallest segment of 0 turn off what Deepness does to a map afterwards.
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


def stac_item(trained: Trained, advice: TileAdvice, file: str, ending: str, fixed: bool) -> dict[str, Any]:
    """Return a STAC item with the MLM extension for one file of the network. A file .safetensors takes normalised
    pixels and gives scores that are no probabilities yet; the others do both steps themselves."""
    saved = trained.checkpoint.saved
    side, own = advice.side if fixed else -1, ending == ".safetensors"
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
