"""The passes of a run from its plan: opens the axes, keeps the layers of this rank's stage, and makes the mode.

Training, validation and prediction open a `ParallelRun` and get from it the passes over their rasters. It imports only
the modules that the plan needs: a run in mode `read` starts sooner without pipelines, blocks and shared layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tiledseg.comm.mesh import Mesh, open_axes, serial_axes
from tiledseg.execution.carrying import CAST_DTYPES, PARAMETER_DTYPES, autocast
from tiledseg.execution.halo_modes import ExchangeMode, LayerMode, ReadMode
from tiledseg.execution.part_passes import Passes, SerialPasses
from tiledseg.geometry.tiling import Tiling
from tiledseg.models.network import GraphNetwork, with_channels_last
from tiledseg.planning.run.pipeline import PipelinePlan
from tiledseg.planning.run.spread import Spread

if TYPE_CHECKING:
    from tiledseg.execution.block_passes import BlockWork
    from tiledseg.models.compiled import CompiledNetwork
    from tiledseg.pipeline.executor import PipelineExecutor
    from tiledseg.spatial.network import SpatialNetwork


class ParallelRun:
    """The common parts of the passes of one run: axes, network, and this rank's part of a pipeline."""

    def __init__(
        self,
        spread: Spread,
        network: GraphNetwork,
        mesh: Mesh,
        precision: str,
        pipeline: PipelinePlan | None = None,
        blocks: tuple[int, int] | None = None,
        store: str = "host",
        compiles: bool = False,
    ) -> None:
        """Move `network` (whole, on the CPU) to the device, channels last, in the dtype of `precision`. With stages
        only the layers of this rank's stage are moved, and the others dropped. `blocks`: the (rows, cols) of blocks in
        which tiles are computed, and which lie in `store` between segments. `compiles`: compile passes with gradients,
        of whole networks in modes that share no layers.

        Collective over all ranks of the mesh. Raises ConfigError if a layer cannot be spread.
        """
        self.spread, self.network, self.mesh, self.precision = spread, network, mesh, precision
        self.pipeline = pipeline
        alone = not spread.shares_images and pipeline is None
        self.axes = serial_axes(mesh.communicator) if alone else open_axes(mesh, spread.mesh)
        self.executor: PipelineExecutor | None = None
        if pipeline is None:
            network.to(mesh.device, PARAMETER_DTYPES[precision])
            if not network.graph.is_untraced:  # a module's own code may need its own layout
                with_channels_last(network)
        else:
            from tiledseg.pipeline.executor import PipelineExecutor
            from tiledseg.pipeline.partition import split_network

            cast = autocast(precision, mesh.device) if precision in CAST_DTYPES else None
            stage = None if self.axes.position is None else self.axes.position.stage  # None: a rank outside the mesh
            split = split_network(network, pipeline, stage, mesh.device, PARAMETER_DTYPES[precision], cast)
            self.executor = None if stage is None else PipelineExecutor(split, self.axes)
        self.spatial: SpatialNetwork | None = None
        if spread.shares_layers:
            from tiledseg.spatial.network import SpatialNetwork

            self.spatial = SpatialNetwork(network, self.axes, spread.fusion, spread.overlap)
        self.work: BlockWork | None = None
        if blocks is not None:
            from tiledseg.execution.block_passes import BlockWork
            from tiledseg.memory.file_store import open_shelf
            from tiledseg.spatial.block_network import BlockNetwork

            self.work = BlockWork(BlockNetwork(network), blocks, open_shelf(store, mesh.device), self.axes)
        self.compiled: CompiledNetwork | None = None
        if compiles:
            from tiledseg.models.compiled import CompiledNetwork

            self.compiled = CompiledNetwork(network)

    def over(self, tilings: Sequence[Tiling], batch: int = 1, spread: Spread | None = None) -> Passes:
        """Return the passes over images that are cut by `tilings`.

        `batch`: the most tiles (in mode `layer`, images) of one shape that run at once in training. `spread`: that of
        these passes if it differs from the run's; their tiles are then dealt out as in mode `read`.
        """
        how = spread or self.spread
        common = self.network, self.mesh, tuple(tilings), self.precision
        mode: ReadMode
        if not how.shares_images:
            mode = ReadMode(*common, self.axes if self.pipeline else None, batch, self.compiled)
        elif self.spatial is None:
            mode = ExchangeMode(*common, self.axes, batch, self.compiled)
        else:
            mode = LayerMode(self.spatial, *common, batch)
        if self.work is not None:
            from tiledseg.execution.block_passes import BlockPasses

            assert self.spread.shares_layers or not self.spread.shares_images, "the plan refuses blocks of tiles' halos"
            return BlockPasses(mode, self.work, how.together)
        if self.pipeline is None:
            return SerialPasses(mode, self.spread.together)
        from tiledseg.execution.pipeline_passes import PipelinePasses

        messages = self.axes.stage_messages
        return PipelinePasses(mode, self.executor, messages, self.pipeline.micro_batches, self.mesh.device)

    def close(self) -> None:
        """Close the axes and the store of blocks. Collective."""
        if self.work is not None:
            self.work.shelf.close()
        self.axes.close()
