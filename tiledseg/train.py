"""`tiledseg train --config run.yaml [--group.key value ...]`: trains a network, under any launcher."""

from __future__ import annotations

from tiledseg.commands.entry import enter

if __name__ == "__main__":
    enter("tiledseg.train")

import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tiledseg.comm.session import run_on_mesh, without_collections
from tiledseg.commands.options import parse_config, to_yaml
from tiledseg.commands.parser import command
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
    config = parse_config(words, COMMAND, "Train a segmentation network on tiles.", _EXAMPLE, files)
    files += class_files(config.data.classes)
    config.data.classes = read_classes(config.data.classes)
    config.check()
    keep_freed_memory(os.environ)

    def train(mesh: Mesh) -> int:
        with without_collections("tiledseg.training.start"):
            from tiledseg.training.start import start  # here: torch is imported after the session has started MPI

        return start(config, to_yaml(config), mesh, files, shlex.join([*COMMAND.split(), *words]))

    return run_on_mesh(train, config.parallel.transport, config.parallel.deadline)
