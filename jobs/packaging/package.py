# A Spack package. From the top folder of the clone, in a repository of your own (`spack repo create`):
#   python -m build --sdist && cp jobs/packaging/package.py REPO/packages/py_tiledseg/
#   cd dist && spack install --no-checksum py-tiledseg ^py-torch+cuda
# The extras s3 and export have no variant: Spack has no obstore and no onnxscript.
# Its newest py-affine was 2.3 in July 2026: add 3.0.
import os

from spack.package import depends_on, license, variant, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyTiledseg(PythonPackage):
    """Train segmentation networks on images too large for one GPU: tiles with exact halos over MPI ranks."""

    manual_download = True  # it is on no index: the sdist lies in the folder that spack is called in
    url = f"file://{os.getcwd()}/tiledseg-0.1.0.tar.gz"

    license("Apache-2.0")
    version("0.1.0")

    variant("mpi", default=True, description="Ranks under mpirun, srun and jsrun")
    variant("plot", default=True, description="Pictures")
    variant("report", default=True, description="report.html")
    variant("zarr", default=False, description="Zarr stores, netCDF files, and xarray's arrays")
    variant("parquet", default=False, description="Lists of images in GeoParquet")
    variant("vector", default=False, description="Polygons as labels, areas and maps")
    variant("tensorboard", default=False, description="TensorBoard events")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@68:", type="build")

    depends_on("py-torch@2.8:2.15", type=("build", "run"))
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-rasterio@1.4:", type=("build", "run"))
    depends_on("py-affine@3:", type=("build", "run"))
    depends_on("py-h5py@3.10:", type=("build", "run"))
    depends_on("py-safetensors@0.5:", type=("build", "run"))
    depends_on("py-pyyaml@6:", type=("build", "run"))
    depends_on("py-rich@13:", type=("build", "run"))

    depends_on("py-mpi4py@4:", when="+mpi", type=("build", "run"))
    depends_on("py-matplotlib@3.8:", when="+plot", type=("build", "run"))
    depends_on("py-jinja2@3.1:", when="+report", type=("build", "run"))
    depends_on("py-matplotlib@3.8:", when="+report", type=("build", "run"))
    depends_on("py-pillow@10.1:", when="+report", type=("build", "run"))
    depends_on("py-xarray@2025.1:", when="+zarr", type=("build", "run"))
    depends_on("py-zarr@3.0.8:", when="+zarr", type=("build", "run"))
    depends_on("py-h5netcdf@1.4:", when="+zarr", type=("build", "run"))
    depends_on("py-scipy@1.13:", when="+zarr", type=("build", "run"))
    depends_on("py-pyarrow@18:", when="+parquet", type=("build", "run"))
    depends_on("py-pyogrio@0.10:", when="+vector", type=("build", "run"))
    depends_on("py-shapely@2.0.6:", when="+vector", type=("build", "run"))
    depends_on("py-tensorboard@2.16:", when="+tensorboard", type=("build", "run"))
