"""tiledseg trains segmentation networks on images too large for one GPU, with the same numbers as if they fitted.

The public names (`docs/reference/python.md`) are imported at their first use, so importing the package is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiledseg.config.run import Config
    from tiledseg.evaluate import evaluate_map
    from tiledseg.export import export
    from tiledseg.foreign.parallelize import ParallelModule, parallelize
    from tiledseg.foreign.pipeline import Pipeline
    from tiledseg.foreign.spread import Halo, halo, trace
    from tiledseg.foreign.tile_dataset import TileDataset, TileSampler
    from tiledseg.inference.trained import load
    from tiledseg.memory.offload import large_model_support
    from tiledseg.models.layers.times import TimeSeries
    from tiledseg.plan import plan
    from tiledseg.predict import predict_raster
    from tiledseg.raster.reader import open_raster
    from tiledseg.synthetic.scene import write_scene
    from tiledseg.tracing.declared import Local, PerPixel, WholeImage, Windows, declare
    from tiledseg.train import train_network

    __version__: str

__all__ = [
    "Config", "Halo", "Local", "ParallelModule", "PerPixel", "Pipeline", "TileDataset", "TileSampler", "TimeSeries",
    "WholeImage", "Windows", "__version__", "declare", "evaluate_map", "export", "halo", "large_model_support", "load",
    "open_raster", "parallelize", "plan", "predict_raster", "trace", "train_network", "write_scene",
]  # fmt: skip
_MODULES = {
    "config.run": "Config",
    "evaluate": "evaluate_map",
    "foreign.parallelize": "ParallelModule parallelize",
    "foreign.pipeline": "Pipeline",
    "foreign.spread": "Halo halo trace",
    "foreign.tile_dataset": "TileDataset TileSampler",
    "inference.trained": "load",
    "memory.offload": "large_model_support",
    "models.layers.times": "TimeSeries",
    "predict": "predict_raster",
    "raster.reader": "open_raster",
    "synthetic.scene": "write_scene",
    "train": "train_network",
    "tracing.declared": "Local PerPixel WholeImage Windows declare",
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tiledseg' has no attribute {name!r}")
    import importlib

    if name == "__version__":
        value: Any = importlib.import_module("tiledseg.errors").VERSION
    else:  # `plan` and `export` are callable modules
        module = importlib.import_module(f"tiledseg.{_PLACES.get(name, name)}")
        value = getattr(module, name) if name in _PLACES else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
