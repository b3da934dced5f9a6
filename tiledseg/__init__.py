"""Train segmentation networks on images too large for one GPU, and get the same numbers as if they fitted.

The names below are imported when they are first used (`docs/reference/python.md`); importing the package loads nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiledseg.api import evaluate_map, halo, predict_raster, trace, train_network
    from tiledseg.config.run import Config
    from tiledseg.export import export
    from tiledseg.foreign.parallelize import parallelize
    from tiledseg.foreign.pipeline import Pipeline
    from tiledseg.foreign.tile_dataset import TileDataset, TileSampler
    from tiledseg.inference.trained import load
    from tiledseg.memory.offload import large_model_support
    from tiledseg.models.layers.times import TimeSeries
    from tiledseg.plan import plan
    from tiledseg.raster.reader import open_raster
    from tiledseg.synthetic.scene_files import write_scene
    from tiledseg.tracing.declared import Local, PerPixel, WholeImage, Windows, declare

    __version__: str

__all__ = [
    "Config",
    "Local",
    "PerPixel",
    "Pipeline",
    "TileDataset",
    "TileSampler",
    "TimeSeries",
    "WholeImage",
    "Windows",
    "__version__",
    "declare",
    "evaluate_map",
    "export",
    "halo",
    "large_model_support",
    "load",
    "open_raster",
    "parallelize",
    "plan",
    "predict_raster",
    "trace",
    "train_network",
    "write_scene",
]

_PLACES = {
    "Config": "tiledseg.config.run:Config",
    "Local": "tiledseg.tracing.declared:Local",
    "PerPixel": "tiledseg.tracing.declared:PerPixel",
    "Pipeline": "tiledseg.foreign.pipeline:Pipeline",
    "TileDataset": "tiledseg.foreign.tile_dataset:TileDataset",
    "TileSampler": "tiledseg.foreign.tile_dataset:TileSampler",
    "TimeSeries": "tiledseg.models.layers.times:TimeSeries",
    "WholeImage": "tiledseg.tracing.declared:WholeImage",
    "Windows": "tiledseg.tracing.declared:Windows",
    "__version__": "tiledseg.version:VERSION",
    "declare": "tiledseg.tracing.declared:declare",
    "evaluate_map": "tiledseg.api:evaluate_map",
    "export": "tiledseg.export",  # modules of commands, which are callable
    "halo": "tiledseg.api:halo",
    "large_model_support": "tiledseg.memory.offload:large_model_support",
    "load": "tiledseg.inference.trained:load",
    "open_raster": "tiledseg.raster.reader:open_raster",
    "parallelize": "tiledseg.foreign.parallelize:parallelize",
    "plan": "tiledseg.plan",
    "predict_raster": "tiledseg.api:predict_raster",
    "trace": "tiledseg.api:trace",
    "train_network": "tiledseg.api:train_network",
    "write_scene": "tiledseg.synthetic.scene_files:write_scene",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'tiledseg' has no attribute {name!r}")
    import importlib

    place, _, attribute = _PLACES[name].partition(":")
    module = importlib.import_module(place)
    globals()[name] = value = getattr(module, attribute) if attribute else module
    return value


def __dir__() -> list[str]:
    return __all__
