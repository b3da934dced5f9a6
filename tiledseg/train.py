"""`tiledseg train --config run.yaml [--group.key value ...]`: trains a network, under any launcher."""

from __future__ import annotations

from tiledseg.commands.entry import enter

if __name__ == "__main__":
    enter("tiledseg.train")

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledseg.comm.session import joined_mesh, run_on_mesh, without_collections
from tiledseg.commands.options import as_config, parse_config, to_yaml
from tiledseg.commands.parser import command
from tiledseg.config.run import Config
from tiledseg.errors import ConfigError, TiledsegError
from tiledseg.raster.array_names import takes_arrays
from tiledseg.raster.labels.classes import class_files, read_classes
from tiledseg.system.freed_memory import keep_freed_memory

if TYPE_CHECKING:
    from tiledseg.comm.mesh import Mesh

COMMAND = "tiledseg train"
_EXAMPLE = "--data.images a.tif --data.labels b.tif --data.classes 5"


@command
def main(words: Sequence[str]) -> int:
    """Train a network; the code is 75 where a signal stopped it early, with its checkpoint written."""
    files: list[str] = []
    config = _ready(parse_config(words, COMMAND, "Train a segmentation network on tiles.", _EXAMPLE, files), files)
    keep_freed_memory(os.environ)

    def train(mesh: Mesh) -> int:
        with without_collections("tiledseg.training.start"):
            from tiledseg.training.start import start  # here: torch is imported after the session has started MPI

        return start(config, to_yaml(config), mesh, files, shlex.join([*COMMAND.split(), *words]))

    return run_on_mesh(train, config.parallel.transport, config.parallel.deadline)


@takes_arrays
def train_network(config: Config | Mapping[str, Any] | str | Path) -> Path:
    """Train like `tiledseg train`, on any number of ranks; return the run's folder. Collective.

    `config`: groups of keys, or a YAML file of them. Images and labels may be xarray.DataArrays with x and y. torch's
    deterministic mode stays as `train.deterministic` sets it. Raises InputError before anything is written,
    TiledsegError if a signal stops the run early, with its checkpoint written.
    """
    from tiledseg.training.start import start

    files = [str(config)] if isinstance(config, (str, Path)) else []
    if files:
        config = parse_config(["--config", *files], COMMAND, "")
    elif isinstance(config, Mapping):
        config = as_config(config)
    if not isinstance(config, Config):
        raise ConfigError(f"the configuration is {config!r}; give a map of groups of keys, or the path of a YAML file")
    ready = _ready(config, files)
    with joined_mesh() as mesh:
        code = start(ready, to_yaml(ready), mesh, files)
    if code:
        raise TiledsegError(f"{ready.run.output}: stopped by a signal with its checkpoint written; call again to go on")
    return Path(ready.run.output)


def _ready(config: Config, files: list[str]) -> Config:
    """Return the configuration with its classes read, and checked; `files` takes the files of classes."""
    files += class_files(config.data.classes)
    config = replace(config, data=replace(config.data, classes=read_classes(config.data.classes)))
    config.check()
    return config
