"""The spread of a run's pixels and layers over its ranks: as set, and as decided, before any rank starts.

Which norms are exact where: the one place that says so.

    | norm | takes statistics over | so it is exact |
    | --- | --- | --- |
    | none, pixel | nothing, or one pixel | everywhere |
    | instance, group | the pixels of an image | where an image is one tile, or in mode `layer`, whose ranks sum them |
    | batch, trained | the pixels of all images of a step, and moves running ones | with one image; several: see below |
    | batch, mapped, or still | nothing: its statistics are constants | everywhere |
    | batch, without running statistics, mapped | the pixels of an image | as instance |

Still: by `model.freeze_norm`. A batch norm is exact with several images a step in mode `layer`, and in mode `read`
with `memory.blocks` where each image is one tile. In stages it never is: micro-batches run one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tiledseg.config.checks import rows_cols
from tiledseg.config.parallel import ParallelConfig
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.pixelwise import Norm
from tiledseg.geometry.shapes import is_legal_size, tensor_shapes
from tiledseg.geometry.sharing.decomposition import MeshShape
from tiledseg.geometry.sharing.layer_windows import layer_blocks
from tiledseg.geometry.tiling import Tiling, deal
from tiledseg.planning.walk.mode_cost import fusion_word


@dataclass(frozen=True)
class Parallelism:
    """The settings of how a run is spread; None where the plan decides.

    `mesh`: (rows, cols) of ranks an image. `fusion`: layers an exchange. `balance`: layers of each chunk; None balances
    the times of the machine's profile, else of an assumed machine. `recompute`: one mode for each stage. `idle_ranks`:
    a job may have more ranks than the mesh. The rest as the keys of the group.
    """

    exact: bool = True
    halo: str = "read"
    mesh: tuple[int, int] | None = None
    fusion: int | None = 1
    overlap: bool = False
    stages: int = 1
    balance: tuple[int, ...] | None = None
    schedule: str = "1f1b"
    micro_batches: int | None = None
    recompute: tuple[str, ...] = ("never",)
    idle_ranks: bool = True


def parallelism(config: ParallelConfig) -> Parallelism:
    """Return the settings of the group `parallel`. Raises ConfigError for a list that is none."""
    return Parallelism(
        exact=config.exact,
        halo=config.halo,
        mesh=rows_cols(config.mesh),
        fusion=config.fusion_depth(),
        overlap=config.overlap,
        stages=config.stages,
        balance=config.layer_counts(),
        schedule=config.schedule,
        micro_batches=config.micro_batches,
        recompute=config.recompute_modes(),
        idle_ranks=config.idle_ranks,
    )


@dataclass(frozen=True)
class Spread:
    """The halo `mode` and the `mesh` of ranks. In mode `read` without stages each rank works by itself. `fusion`:
    layers that an exchange serves. `overlap`: convolutions compute while halos travel. `together`: all images of a step
    go through the network together, for the statistics of a batch norm."""

    mode: str = "read"
    mesh: MeshShape = field(default_factory=lambda: MeshShape(1, 1, 1))
    fusion: int = 1
    overlap: bool = False
    together: bool = False

    @property
    def shares_images(self) -> bool:
        """True if the ranks of a replica own parts of one image, and send each other its halos."""
        return self.mode != "read"

    @property
    def shares_layers(self) -> bool:
        """True if the ranks of a replica compute each layer together, on their blocks of its tensors."""
        return self.mode == "layer"

    @property
    def in_words(self) -> str:
        """The spread as a line of the log."""
        fused = f", fusion {fusion_word(self.fusion)}{', overlap' * self.overlap}" if self.shares_layers else ""
        return f"{self.mode}, {f'ranks {self.mesh}' if self.mesh.ranks > 1 else 'tiles dealt out'}{fused}"


def goes_together(
    parallel: Parallelism, graph: Graph, images_per_step: int, whole_images_in_blocks: bool = False
) -> bool:
    """Return True if all images of a step go through the network together: layer by layer, or segment by segment."""
    alone = not (parallel.halo == "layer" or whole_images_in_blocks) or parallel.stages > 1
    return images_per_step > 1 and not alone and bool(measuring(graph, over=("batch",)))


def idle_note(spread: Spread, ranks: int, images_per_step: int, batch: int = 1, trains: bool = True) -> str | None:
    """Return the fault and the remedy where ranks own nothing, else None. `batch`: images that run at once."""
    mesh, trained = spread.mesh, trains and spread.shares_images
    if mesh.ranks >= ranks or (not spread.shares_images and mesh.stages == 1):
        return None
    images = f" with steps of {images_per_step} images{f' in batches of {batch}' * (batch > 1)}" if trained else ""
    start = f"{mesh.ranks} ranks" if spread.shares_images else f"{mesh.ranks} or {mesh.ranks + mesh.stages} ranks"
    ways = ", a smaller train.tiles_per_batch" * (batch > 1) + ", a finer tiling.grid" * spread.shares_images
    ways += ", more train.images_per_step" * trained
    return f"{ranks - mesh.ranks} of {ranks} ranks own nothing: the mesh is {mesh}{images}; start {start}{ways}"


def choose_mesh(
    shape: tuple[int, int] | None, tilings: Sequence[Tiling], ranks: int, images_per_step: int = 1, stages: int = 1
) -> MeshShape:
    """Return the axes for a job of `ranks` ranks in pipelines of `stages`, steps of `images_per_step` images, and
    rasters cut by `tilings`.

    `shape`: rows and columns of ranks an image, or None for auto. Auto keeps the most ranks busy; then it takes the
    fewest ranks an image (several images in flight exchange less), then the shortest edges between blocks. Depends on
    nothing but its arguments. Raises ConfigError where the mesh has more ranks than the job.
    """
    if shape is not None and math.prod(shape) * stages > ranks:
        split = f" in {stages} stages" if stages > 1 else ""
        raise ConfigError(
            f"parallel.mesh is [{shape[0]}, {shape[1]}], {math.prod(shape) * stages} ranks an image{split}, but the "
            f"job has {ranks}; start more ranks, or use a smaller mesh"
        )
    rows, cols = (min(tiling.grid[dim] for tiling in tilings) for dim in (0, 1))
    (height, width), most = tilings[0].raster, ranks // stages
    every = ((r, c) for r in range(1, min(rows, most) + 1) for c in range(1, min(cols, most // r) + 1))
    shapes = every if shape is None else [shape]
    meshes = [MeshShape(min(images_per_step, most // (r * c)), r, c, stages) for r, c in shapes]
    return min(
        meshes, key=lambda m: (-m.ranks, m.rows * m.cols, (m.rows - 1) * width + (m.cols - 1) * height, m.rows, m.cols)
    )


@dataclass(frozen=True)
class MicroBatchSize:
    """The largest micro-batch of a pipeline: its (height, width) in `pixels`, the most micro-batches of a step, and the
    bytes of a value."""

    pixels: tuple[int, int]
    count: int
    value_bytes: int


def largest_input(spread: Spread, graph: Graph, tilings: Sequence[Tiling]) -> tuple[int, int]:
    """Return the (height, width) of the largest part of rasters cut by `tilings` that goes through the network."""
    if not spread.shares_layers:
        return max([tiling.context_max for tiling in tilings], key=math.prod)
    sizes = []
    for tiling in tilings:
        blocks = layer_blocks(tiling, graph, (spread.mesh.rows, spread.mesh.cols), spread.fusion)
        height, width = (max(block.size for block in cut.blocks) for cut in (blocks.rows, blocks.cols))
        while not is_legal_size(graph, height):  # a block of an unpadded network may be no legal input
            height += 1
        while not is_legal_size(graph, width):
            width += 1
        sizes.append((height, width))
    return max(sizes, key=math.prod)


def micro_batch_size(
    spread: Spread,
    graph: Graph,
    tilings: Sequence[Tiling],
    contexts: Sequence[tuple[int, int]],
    images_per_step: int,
    value_bytes: int,
) -> MicroBatchSize:
    """Return the largest micro-batch of rasters cut by `tilings`, and how many a pipeline has in a step at most.
    `contexts`: (height, width) of the tiles of a step."""
    count, shape = -(-images_per_step // spread.mesh.replicas), (spread.mesh.rows, spread.mesh.cols)
    if not spread.shares_images:
        count = max(map(len, deal(contexts, spread.mesh.replicas)))
    elif not spread.shares_layers:
        blocks = ([-(-tiles // ranks) for tiles, ranks in zip(each.grid, shape, strict=True)] for each in tilings)
        count *= max(map(math.prod, blocks))
    return MicroBatchSize(largest_input(spread, graph, tilings), count, value_bytes)


def measuring(graph: Graph, trains: bool = True, over: Sequence[str] = ("image", "batch")) -> tuple[Node, ...]:
    """Return the nodes whose statistics are over the pixels of an image, or of all images of a step (a `batch`). Unless
    it `trains`, running statistics are constants, and their nodes do not count."""
    nodes = (node for node in graph.nodes if trains or not node.layer.tracks)
    return tuple(node for node in nodes if node.layer.statistics in over)


def norm_fault(graph: Graph, mode: str, tiles: int, images: int, trains: bool = True, keyed: bool = True) -> str | None:
    """Return why a norm would differ from that of the undivided run, and the remedy; None where it does not.

    `tiles`: the most tiles of an image. `images`: the most images of a step, each of which moves the running
    statistics of a batch norm by itself. `keyed`: keys of the configuration set the norms, not the network's author.
    """
    nodes, several = measuring(graph, trains), measuring(graph, trains, over=("batch",))
    if nodes and tiles > 1 and mode != "layer":
        fault = "its statistics would be those of a tile, not of the whole image; use parallel.halo layer"
        last = ", or tiling.grid 1 (with memory.blocks in little memory)"
        others = ", norm none or pixel" if trains and keyed else ""
    elif trains and images > 1 and several:
        nodes, blocks = several, " or memory.blocks," if mode == "read" and tiles == 1 else ""
        fault = f"{images} images at once would each take, and move, statistics by themselves; use one image a step, "
        fault += f"parallel.halo layer{blocks} without stages"
        others, last = ", or norm none, pixel, instance or group" if keyed else "", ""
    else:
        return None
    still = ", model.freeze_norm" if any(node.layer.tracks for node in nodes) else ""
    return f"{norm_words(nodes[0], keyed)}: {fault}{still}{others}{last}"


def check_statistics(
    graph: Graph, bands: int, tilings: Iterable[Tiling], mode: str, trains: bool = True, keyed: bool = True
) -> None:
    """Raise ConfigError where a norm would see one pixel of a channel, whose variance is no statistic."""
    norms = [(node.name, node.layer) for node in measuring(graph, trains)]
    names = {name for name, layer in norms if isinstance(layer, Norm) and layer.kind != "group"}  # several channels
    if not names:
        return
    whole, remedy = mode == "layer", ", fewer model.levels, or norm none or pixel" if keyed else ""
    sizes = {size for tiling in tilings for size in ([tiling.whole.shape] if whole else tiling.contexts)}
    for height, width in sorted(sizes):
        shapes = tensor_shapes(graph, bands, height, width)[1:]
        for node, shape in zip(graph.nodes, shapes, strict=True):
            if node.name in names and shape[1] * shape[2] == 1:
                what = "an image" if whole else "a tile"
                raise ConfigError(
                    f"{norm_words(node, keyed)}: it takes statistics over pixels, but {what} of {height} x {width} px, "
                    f"halo included, leaves 1 pixel at {node.name}; use larger ones{remedy}"
                )


def norm_words(node: Node, keyed: bool) -> str:
    """Return the name of a node that takes statistics: the key that sets its kind, or its author's name."""
    return node.layer.in_words(None if keyed else node.name)
