"""Peers: where each comes from, its version, and what was changed to make it run, in words.

`environment` puts the packages of `peers.txt` into `build/peers`, which the processes of peers alone find. torch is
that of this project. Peers that no index has are built from sources that a person brings:
`git clone ADDRESS build/peers-sources/NAME`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "peers"
SOURCES = ROOT / "build" / "peers-sources" / "distdl"
BROUGHT = ("nvidia-physicsnemo", "torchgpipe", "distdl")  # by pip or a person; the others are there
DISTDL = "https://github.com/distdl/distdl"


@dataclass(frozen=True)
class Peer:
    """A project beside this one: `changed` to make it run here, or `absent`, the reason why it does not."""

    name: str
    package: str
    where: str
    changed: str = "nothing"
    absent: str = ""

    @property
    def version(self) -> str:
        """Return the version of its package, '' where it is not there."""
        environment(self.name)
        if self.package == "distdl":
            return "0.5.0-dev" if (SOURCES / "src").exists() else ""
        found = list(metadata.distributions(name=self.package, path=[str(FOLDER), *sys.path]))
        return found[0].version if found else ""


OF_CUDA = "its layers call `torch.cuda` and make their messages on a GPU; none is here"
NO_TORCHVISION = (
    "imports torchvision, whose wheels are for CUDA: `operator torchvision::nms does not exist` beside this torch"
)
TURNED_OFF = "activations in place were put out of place"
PEERS = {
    each.name: each
    for each in (
        Peer("torch DTensor", "torch", "PyPI", f"{TURNED_OFF}; weights replicated by `distribute_module`"),
        Peer(
            "torch DTensor, older rule",
            "torch",
            "PyPI",
            "the strategies for convolutions that torch 2.13 added are taken out: they know the batch dim alone, come "
            "before the older rules, and a block is computed without its neighbours; else as above",
        ),
        Peer(
            "ShardTensor",
            "nvidia-physicsnemo",
            "PyPI, `--no-deps`",
            f"`register_custom_ops` is called by hand, since it runs where CUDA is there alone; {TURNED_OFF}",
        ),
        Peer(
            "DistDL",
            "distdl",
            f"`git clone {DISTDL} build/peers-sources/distdl`, at a641638",
            "an alias that NumPy 1.24 removed (`np.int`); each layer takes a copy of its input, which it overwrites; a "
            "transposed convolution of kernel = stride is torch's, its weights spread by Broadcast; runs over MPI",
        ),
        Peer("torchgpipe", "torchgpipe", "PyPI", "a worker thread for each partition, which devices of one CPU share"),
        Peer("torch.distributed.pipelining", "torch", "PyPI"),
        Peer("MONAI sliding window", "monai", "PyPI"),
        Peer("MPI4DL", "mpi4dl", "https://github.com/OSU-Nowlab/MPI4DL", absent=OF_CUDA),
        Peer(
            "Streaming CNN",
            "streamingcnn",
            "https://github.com/DIAGNijmegen/StreamingCNN",
            absent="imports `torch._six`, which torch 2 lacks, and puts its statistics on a GPU",
        ),
        Peer("torchgeo", "torchgeo", "PyPI", absent=NO_TORCHVISION),
        Peer("terratorch", "terratorch", "PyPI", absent=NO_TORCHVISION),
        Peer("raster-vision", "rastervision", "PyPI", absent=NO_TORCHVISION),
    )
}


@cache
def environment(name: str) -> dict[str, str]:
    """Install the packages of peers where this one needs any and they are not there, and build their sources; a package
    that cannot be had is left out. Return the variables by which a process finds them."""
    wanted, done = Path(__file__).with_name("peers.txt"), FOLDER / "peers.txt"
    brought = name in PEERS and PEERS[name].package in BROUGHT
    if brought and not (done.exists() and done.read_text() == wanted.read_text()):
        for line in wanted.read_text().splitlines():
            if not line.startswith("#"):
                _quietly("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(FOLDER), line)
        FOLDER.mkdir(parents=True, exist_ok=True)
        done.write_text(wanted.read_text())
    if brought and SOURCES.exists() and not list(SOURCES.glob("src/distdl/functional/interpolate/_cpp*")):
        _quietly("setup.py", "build_ext", "--inplace", folder=SOURCES)
    folders = [str(ROOT), *([str(FOLDER), str(SOURCES / "src")] if brought else []), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "OMP_NUM_THREADS": "1"}


def _quietly(*words: str, folder: Path = ROOT) -> None:
    subprocess.run([sys.executable, *words], cwd=folder, check=False, capture_output=True, timeout=300)
