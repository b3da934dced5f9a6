"""From the plan of a run to its passes: opens the axes, leaves each rank its stage's layers, and makes the mode.

Training, validation and prediction open one and ask it for the passes over their rasters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tiledseg.comm.axes import Axes, open_axes, serial_axes
from tiledseg.comm.mesh import Mesh
from tiledseg.execution.block_passes import BlockPasses, BlockWork
from tiledseg.execution.halo_modes import ExchangeMode, HaloMode, LayerMode, ReadMode
from tiledseg.execution.passes import Passes, SerialPasses
from tiledseg.execution.pipeline_passes import PipelinePasses
from tiledseg.execution.precision import PARAMETER_DTYPES, autocast
from tiledseg.execution.scatter_mode import ScatterMode
from tiledseg.execution.step_passes import StepPasses
from tiledseg.geometry.tiling import Tiling
from tiledseg.memory.shelf import HOST, open_shelf
from tiledseg.models.network import GraphNetwork
from tiledseg.pipeline.executor import PipelineExecutor
from tiledseg.pipeline.partition import split_network
from tiledseg.planning.run.pipeline import PipelinePlan
from tiledseg.planning.run.spread import Spread
from tiledseg.spatial.blocks.network import BlockNetwork
from tiledseg.spatial.network import SpatialNetwork


@dataclass(frozen=True)
class ParallelRun:
    """What the passes of one run share: axes, network, and this rank's part of a pipeline. `close()` is collective."""

    spread: Spread
    pipeline: PipelinePlan | None
    network: GraphNetwork
    mesh: Mesh
    axes: Axes
    spatial: SpatialNetwork | None
    executor: PipelineExecutor | None
    precision: str
    work: BlockWork | None = None

    @staticmethod
    def open(
        spread: Spread,
        network: GraphNetwork,
        mesh: Mesh,
        precision: str,
        pipeline: PipelinePlan | None = None,
        blocks: tuple[int, int] | None = None,
        store: str = HOST,
    ) -> ParallelRun:
        """Puts `network` (whole, on the CPU) on the device, channels last, in the dtype of `precision`; with stages,
        the layers of this rank's stage: the values of the others are let go. `blocks`: tiles are computed in so many
        (rows, cols), which lie in `store` in between.

        Collective over all ranks of the mesh. Raises ConfigError where a layer cannot be spread.
        """
        alone = not spread.shares_images and pipeline is None
        axes = serial_axes(mesh.communicator) if alone else open_axes(mesh, spread.mesh)
        executor = None
        if pipeline is None:
            network.to(mesh.device, PARAMETER_DTYPES[precision])
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        else:
            executor = _open_stage(pipeline, network, mesh, axes, precision)
        spatial = SpatialNetwork(network, axes, spread.fusion, spread.overlap) if spread.shares_layers else None
        work = None if blocks is None else BlockWork(BlockNetwork(network), blocks, open_shelf(store, mesh.device))
        return ParallelRun(spread, pipeline, network, mesh, axes, spatial, executor, precision, work)

    def over(self, tilings: Sequence[Tiling], batch: int = 1, spread: Spread | None = None) -> Passes:
        """The passes over images that are cut by `tilings`; while training, up to `batch` tiles of one shape at once,
        of which there are none in stages and in mode `layer`. `spread`: theirs, where it is another than the run's;
        then their tiles are dealt out, and computed by the network as it is."""
        mode = self._mode(tuple(tilings), batch, spread or self.spread)
        if self.work is not None:
            assert isinstance(mode, ReadMode), "the plan refuses blocks of shared images"
            passes: SerialPasses = BlockPasses(mode, self.work)
            return passes
        if self.pipeline is None:
            together = self.spread.together
            return StepPasses(mode) if isinstance(mode, LayerMode) and together else SerialPasses(mode, batch)
        meter = self.axes.stage_messages.meter
        return PipelinePasses(mode, self.executor, meter, self.pipeline.micro_batches, self.mesh.device)

    def close(self) -> None:
        """Ends the axes, and the store of blocks. Collective."""
        if self.work is not None:
            self.work.shelf.close()
        self.axes.close()

    def _mode(self, tilings: tuple[Tiling, ...], batch: int, spread: Spread) -> HaloMode:
        if not spread.shares_images:
            axes = self.axes if self.pipeline else None
            return ReadMode(self.network, self.mesh, tilings, self.precision, axes, batch)
        if self.spatial is None:
            mode = {"exchange": ExchangeMode, "scatter": ScatterMode}[spread.mode]
            return mode(self.network, self.mesh, self.axes, tilings, self.precision, batch)
        return LayerMode(self.spatial, self.network, self.mesh, tilings, self.precision, batch)


def _open_stage(
    pipeline: PipelinePlan, network: GraphNetwork, mesh: Mesh, axes: Axes, precision: str
) -> PipelineExecutor | None:
    """This rank's stage; None on a rank outside the mesh, which keeps no layer."""
    cast = autocast(precision, mesh.device) if precision == "bf16" else None
    stage = None if axes.position is None else axes.position.stage
    split = split_network(network, pipeline, stage, mesh.device, PARAMETER_DTYPES[precision], cast)
    return None if stage is None else PipelineExecutor(split, axes)
