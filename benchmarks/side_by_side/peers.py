"""Peers: where each comes from, its version, and what was changed to make it run, in words.

`environment` puts `PACKAGES` into `build/peers`. torch is that of this project. A peer that no index has is built from
sources that a person brings: `git clone ADDRESS build/peers-sources/NAME`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "peers"
SOURCES = ROOT / "build" / "peers-sources" / "distdl"
INTERPOLATE = SOURCES / "src" / "distdl" / "functional" / "interpolate"
BROUGHT = ("nvidia-physicsnemo", "torchgpipe", "distdl", "terratorch")  # by pip or a person; the others are there
# Peers, and what they import; kornia is of the foreign networks.
PACKAGES = """
aiobotocore==3.10.0 aiohappyeyeballs==2.7.1 aiohttp==3.14.5 aioitertools==0.13.0 aiosignal==1.4.0 botocore==1.44.8
frozenlist==1.8.0 jaxtyping==0.3.11 jmespath==1.1.0 kornia==0.9.0 kornia_rs==0.2.0 multidict==7.2.1
nvidia-physicsnemo==2.2.2 propcache==0.5.4 nvtx==0.2.17 pyvers==0.2.3 s3fs==2026.9.0 six==1.17.0 tensordict==0.15.3
termcolor==3.3.0 terratorch==1.2.13 torchgpipe==0.0.7 tqdm==4.70.1 treelib==1.8.0 warp-lang==1.19.0 wrapt==2.5.2
yarl==1.25.1
"""
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
        return found[0].version if found and not self.absent else ""


NO_TORCHVISION = "imports torchvision, whose wheels are for CUDA: `operator torchvision::nms does not exist` here"
TURNED_OFF = "activations in place were put out of place"
OF_DTENSOR = f"""weights replicated by `distribute_module`; {TURNED_OFF}; the strategies for convolutions that torch
2.13 added are taken out: they know the batch dim alone, and no layer was exact with them (commit 7b249000)"""
OF_SHARDS = f"`register_custom_ops` is called by hand, since it runs where CUDA is there alone; {TURNED_OFF}"
OF_DISTDL = """an alias that NumPy 1.24 removed (`np.int`); each layer takes a copy of its input, which it overwrites; a
transposed convolution of kernel = stride is torch's, its weights spread by Broadcast; C++ compiled with `-O1` in one
file; runs over MPI"""
OF_TERRATORCH = "`tiled_inference` is loaded without its package, which imports torchvision (a stand-in)"
OF_GPIPE = "a worker thread for each partition, which devices of one CPU share"
OF_MPI4DL = "its layers call `torch.cuda` and make their messages on a GPU; none is here"
OF_STREAMING = "imports `torch._six`, which torch 2 lacks, and puts its statistics on a GPU"
OF_TORCHGEO = f"samplers and data; it joins no map, and spreads no image over ranks; {NO_TORCHVISION}"
PEERS = {
    each.name: each
    for each in (
        Peer("torch DTensor", "torch", "PyPI", OF_DTENSOR),
        Peer("ShardTensor", "nvidia-physicsnemo", "PyPI, `--no-deps`", OF_SHARDS),
        Peer("DistDL", "distdl", f"`git clone {DISTDL} build/peers-sources/distdl`, at a641638", OF_DISTDL),
        Peer("torchgpipe", "torchgpipe", "PyPI", OF_GPIPE),
        Peer("torch.distributed.pipelining", "torch", "PyPI"),
        Peer("MONAI sliding window", "monai", "PyPI"),
        Peer("terratorch", "terratorch", "PyPI, `--no-deps`", OF_TERRATORCH),
        Peer("MPI4DL", "mpi4dl", "https://github.com/OSU-Nowlab/MPI4DL", absent=OF_MPI4DL),
        Peer("Streaming CNN", "streamingcnn", "https://github.com/DIAGNijmegen/StreamingCNN", absent=OF_STREAMING),
        Peer("torchgeo", "torchgeo", "PyPI", absent=OF_TORCHGEO),
        Peer("raster-vision", "rastervision", "PyPI", absent=NO_TORCHVISION),
    )
}


@cache
def environment(name: str) -> dict[str, str]:
    """Install the packages of peers where this one needs any and they are not there, and build their sources; a package
    that cannot be had is left out. Return the variables by which a process finds those that are there."""
    done = FOLDER / "packages.txt"
    brought = name in PEERS and PEERS[name].package in BROUGHT
    if brought and not (done.exists() and done.read_text() == PACKAGES):
        start = (sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target", str(FOLDER))
        _quietly(*start, *PACKAGES.split())
        FOLDER.mkdir(parents=True, exist_ok=True)
        done.write_text(PACKAGES)
    if brought and SOURCES.exists() and not list(INTERPOLATE.glob("_cpp*")):
        # Its C++ at once, in half a minute; its `setup.py` takes three.
        unity = FOLDER / "interpolate.cpp"
        unity.write_text("".join(f'#include "{path}"\n' for path in sorted(INTERPOLATE.glob("src/*.cpp"))))
        headers = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"], str(INTERPOLATE / "src")]
        flags = "-O1 -shared -fPIC -std=c++20 -fopenmp -DAT_PARALLEL_OPENMP -DTORCH_EXTENSION_NAME=_cpp"
        words = (*flags.split(), "-DTORCH_API_INCLUDE_EXTENSION_H", *(f"-I{path}" for path in headers), str(unity))
        made = str(INTERPOLATE / f"_cpp{sysconfig.get_config_var('EXT_SUFFIX')}")
        libraries = (f"-L{path}" for path in cpp_extension.library_paths())
        _quietly("c++", *words, "-o", made, *libraries, "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10")
    path = [str(ROOT), str(FOLDER), str(SOURCES / "src"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1"}


def _quietly(*words: str) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        subprocess.run(words, cwd=ROOT, check=False, capture_output=True, timeout=400)
