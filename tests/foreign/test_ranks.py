"""The law for a module over the ranks of a program: `parallelize` and `Pipeline` against the module itself.

Under mpirun, on as many ranks as the job has.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tiledseg
from tests.foreign.modules import Somebody, Telling
from tests.law.cases import relative
from tiledseg.comm.mesh import Mesh
from tiledseg.errors import ConfigError, GeometryError
from tiledseg.models.dropout import DropoutKey, set_dropout_key

pytestmark = pytest.mark.mpi
BOUND = 1e-12
SIDES = 44, 60
MESHES = {1: [(1, 1)], 2: [(2, 1), (1, 1)], 3: [(1, 3)], 4: [(2, 2), (1, 2)]}


@pytest.fixture(autouse=True)
def mesh(meshes: dict[str, Mesh]) -> Mesh:
    """The program's own process group, which the calls join."""
    return meshes["gloo"]


def module(norm: bool = False) -> nn.Module:
    torch.manual_seed(3)
    return Somebody(norm=norm).double()


def images(count: int, height: int = SIDES[0], width: int = SIDES[1]) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(8)
    x_BCHW = torch.randn(count, 2, height, width, generator=draw, dtype=torch.float64)
    return x_BCHW, torch.randint(0, 3, (count, height, width), generator=draw)


def loss(logits_BKHW: torch.Tensor, target_BHW: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits_BKHW, target_BHW, reduction="sum")


def check_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if not parameter.is_meta and not name.startswith("spare"):
            assert relative(parameter.grad, expected[name].grad) < BOUND, name


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_block_of_each_rank(mesh: Mesh, which: int, norm: bool) -> None:
    """y, dx, dW and buffers, of an image that divides by nothing; once more as torch's DDP sums gradients. A batch norm
    measures the images of all replicas, as the module does the stacked ones."""
    if which >= len(MESHES[mesh.size]):
        pytest.skip("no other mesh of so many ranks")
    whole = module(norm)
    spread = tiledseg.parallelize(copy.deepcopy(whole), MESHES[mesh.size][which])
    assert list(spread.state_dict()) == list(whole.state_dict())
    x_BCHW, target_BHW = images(spread.replicas)
    x_BCHW.requires_grad_()
    expected_BKHW = whole(x_BCHW)
    loss(expected_BKHW, target_BHW).backward()
    mine = slice(spread.replica, spread.replica + 1)
    cut, out = (slice(None), *spread.block(*SIDES).slices), spread.output_block(*SIDES).slices
    for wrap in (None, DistributedDataParallel)[: mesh.size]:
        block_BCHW = x_BCHW.detach()[mine][(slice(None), *cut)].clone().requires_grad_()
        runs = spread if wrap is None else wrap(spread, find_unused_parameters=True)  # `spare`
        for parameter in spread.parameters():
            parameter.grad = None
        output_BKHW = runs(block_BCHW)
        assert relative(output_BKHW, expected_BKHW[mine][(..., *out)]) < BOUND
        ours = loss(output_BKHW, target_BHW[mine][(..., *out)])
        (ours if wrap is None else ours * mesh.size).backward()
        if wrap is None:
            spread.reduce_gradients()
            for name, buffer in whole.named_buffers():
                assert relative(spread.get_buffer(name).double(), buffer.double()) < BOUND, name
        assert (
            relative(block_BCHW.grad * (1 if wrap is None else 1 / mesh.size), x_BCHW.grad[mine][(slice(None), *cut)])
            < BOUND
        )
        check_gradients(spread, whole)
    spread.close()


@pytest.mark.ranks(2, 3)
def test_what_the_module_returns(mesh: Mesh) -> None:
    """A dict, with a list in it, of this rank's blocks; the loss of a pipeline takes it too."""
    torch.manual_seed(3)
    whole = Telling().double()
    x_BCHW, target_BHW = images(1)
    expected = whole(x_BCHW)
    spread = tiledseg.parallelize(copy.deepcopy(whole), (mesh.size, 1))
    rows, cols = spread.block(*SIDES).slices
    found = spread(x_BCHW[:, :, rows, cols])
    own = (..., *spread.output_block(*SIDES).slices)
    assert relative(found["out"], expected["out"][own]) < BOUND
    scores, number = found["aux"]
    assert (list(found), number) == (["out", "aux"], 3)
    assert relative(scores, expected["aux"][0][own]) < BOUND
    spread.close()
    if mesh.size > 1:
        pipeline = tiledseg.Pipeline(copy.deepcopy(whole), mesh.size)
        got = pipeline.step(x_BCHW, target_BHW, lambda returned, target: loss(returned["out"], target))
        assert abs(got.item() - loss(expected["out"], target_BHW).item()) < 1e-9
        pipeline.close()


def test_replicas_of_a_pipeline_with_a_batch_norm(mesh: Mesh) -> None:
    """Each would move its statistics by itself; evaluated norms do not."""
    if mesh.size != 4:
        pytest.skip("two pipelines of two ranks")
    pipeline = tiledseg.Pipeline(module(norm=True), 2)
    x_BCHW, target_BHW = images(1)
    with pytest.raises(ConfigError, match=r"'stem\.norm' is a batch norm, which would move .* on each of 2"):
        pipeline.step(x_BCHW, target_BHW, loss)
    for part in pipeline.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eval()
    assert torch.isfinite(pipeline.step(x_BCHW, target_BHW, loss))
    pipeline.close()


@pytest.mark.ranks(2, 3)
def test_what_makes_no_image_is_refused_on_all_ranks(mesh: Mesh) -> None:
    with pytest.raises(ConfigError, match=rf"mesh \({mesh.size + 1}, 1\) takes {mesh.size + 1} ranks"):
        tiledseg.parallelize(module(), (mesh.size + 1, 1))
    spread = tiledseg.parallelize(module(), (1, mesh.size))
    assert sum(mesh.communicator.gather_objects(spread.block(8, 52).area)) == 8 * 52
    if mesh.size > 1:
        with pytest.raises(
            GeometryError, match=r"each rank has the whole 8 x 52 pixels that .block\(8, 52\) cuts; give"
        ):
            spread(torch.zeros(1, 2, 8, 52, dtype=torch.float64))
        with pytest.raises(GeometryError, match="make no image"):
            spread(torch.zeros(1, 2, 8 + 4 * mesh.rank, 8, dtype=torch.float64))
        with pytest.raises(GeometryError, match="of as many images"):
            spread(torch.zeros(1 + mesh.rank, 2, 8, 8, dtype=torch.float64))
    for shape in ((2, 8, 8), (1, 3, 8, 8)):
        with pytest.raises(GeometryError, match=r"takes \(batch, 2, height, width\)"):
            spread(torch.zeros(shape, dtype=torch.float64))
    spread.close()


@pytest.mark.parametrize(
    ("schedule", "micro_batch", "norm"),
    [("1f1b", 1, "moving"), ("gpipe", 1, "none"), ("gpipe", 2, "moving"), ("gpipe", 3, "still")],
)
def test_a_stage_on_each_rank(mesh: Mesh, schedule: str, micro_batch: int, norm: str) -> None:
    """Loss, gradients, buffers, state dict, outputs and an optimizer's step. The loss is a sum over the batch, where
    norms stand still; those that measure see a micro-batch, the last one of fewer images."""
    stages = {2: 2, 3: 3, 4: 2}.get(mesh.size)
    if stages is None or (norm == "moving" and mesh.size > stages):
        pytest.skip("a pipeline needs two ranks, and replicas move the statistics of a norm each by itself: see above")
    whole, count = module(norm != "none"), 5
    original = copy.deepcopy(whole.state_dict())
    pipeline = tiledseg.Pipeline(copy.deepcopy(whole), stages, schedule=schedule, micro_batch=micro_batch)
    assert sum(pipeline.balance) == len(pipeline.network.graph)
    found = pipeline.state_dict()
    assert [name for name in original if not torch.equal(found[name], original[name])] == []
    assert list(found) == list(original)
    for part in (*whole.modules(), *pipeline.modules()):
        if isinstance(part, nn.BatchNorm2d):
            part.train(norm == "moving")
    x_BCHW, target_BHW = images(count * pipeline.replicas)
    size = micro_batch if norm == "moving" else len(x_BCHW)
    expected = sum(loss(whole(x_BCHW[i : i + size]), target_BHW[i : i + size]) for i in range(0, len(x_BCHW), size))
    expected.backward()
    mine = slice(count * pipeline.replica, count * (pipeline.replica + 1))
    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9) for m in (pipeline, whole))
    got = pipeline.step(x_BCHW[mine], target_BHW[mine], loss)
    sums = mesh.communicator.gather_objects(float(got))
    assert abs(sum(sums) / stages - expected.item()) < BOUND * expected.item()
    pipeline.reduce_gradients()
    check_gradients(pipeline, whole)
    optimizer.step(), theirs.step()
    stepped = pipeline.state_dict()
    for name, tensor in whole.state_dict().items():
        assert relative(stepped[name].double(), tensor.double()) < BOUND, name
    pipeline.eval(), whole.eval()
    pipeline.load_state_dict(original), whole.load_state_dict(original)
    with torch.no_grad():
        assert relative(pipeline(x_BCHW[mine]), whole(x_BCHW[mine])) < BOUND
    *_, last = original
    with pytest.raises(RuntimeError, match=f"Missing key.*{last}"):
        pipeline.load_state_dict({name: value for name, value in original.items() if name != last})
    pipeline.close()


def dropping() -> nn.Module:
    torch.manual_seed(3)
    first, last = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
    return nn.Sequential(first, nn.Dropout2d(0.5), nn.ReLU(), last).double()


@pytest.mark.ranks(2, 3)
def test_dropout_is_drawn_for_each_call_and_image(mesh: Mesh) -> None:
    """Whatever rank holds what: as the undivided network drops that is told the same keys."""
    whole, (x_BCHW, target_BHW) = tiledseg.trace(dropping(), 2), images(3)
    spread = tiledseg.parallelize(dropping(), (mesh.size, 1), seed=7)
    cut, out = ((..., *box.slices) for box in (spread.block(*SIDES), spread.output_block(*SIDES)))
    made = []
    for call in range(2):
        set_dropout_key(whole, *(DropoutKey(7, call, image) for image in range(3)))
        made.append(whole(x_BCHW).detach())
        assert relative(spread(x_BCHW[cut]), made[call][out]) < BOUND
    assert not torch.equal(*made)
    assert list(spread.state_dict()) == list(dropping().state_dict())
    again = tiledseg.parallelize(dropping(), (mesh.size, 1), seed=7)  # a loop that goes on
    again.load_state_dict(spread.state_dict())
    assert relative(again(x_BCHW[cut]), made[0][out]) < BOUND, "without its calls, what it dropped first"
    again.calls = spread.calls - 1
    assert relative(again(x_BCHW[cut]), made[1][out]) < BOUND
    again.close()
    assert torch.equal(spread.eval()(x_BCHW[cut]), spread(x_BCHW[cut]))
    spread.close()
    if mesh.size > 1:
        set_dropout_key(whole, *(DropoutKey(7, 1, image) for image in range(3)))
        expected = loss(whole(x_BCHW), target_BHW)
        expected.backward()
        pipeline = tiledseg.Pipeline(dropping(), mesh.size, micro_batch=2, seed=7)
        pipeline.step(x_BCHW, target_BHW, loss)
        for parameter in pipeline.parameters():
            parameter.grad = None
        assert abs(pipeline.step(x_BCHW, target_BHW, loss) - expected) < BOUND * expected
        check_gradients(pipeline, whole)
        pipeline.close()


@pytest.mark.ranks(2, 3)
def test_a_pipeline_refuses_what_cannot_be_on_all_ranks(mesh: Mesh) -> None:
    """Before a rank waits for another: what a stage alone would notice leaves the others waiting."""
    for stages, more, words in (
        (mesh.size + 1, {}, f"but the job has {mesh.size}"),
        (1, {}, "stages is 1; give a whole number, at least 2"),
        (2, {"micro_batch": 0}, "micro_batch is 0; give a whole number, at least 1"),
        (max(2, mesh.size), {"balance": [1] * mesh.size}, "balance" if mesh.size > 1 else "but the job has 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            tiledseg.Pipeline(module(), stages, **more)
    if mesh.size == 1:
        return
    pipeline = tiledseg.Pipeline(module(), mesh.size)
    x_BCHW, target_BHW = images(2)
    for wrong in (x_BCHW[0], x_BCHW[:, :1]):
        for call in (lambda x: pipeline.step(x, target_BHW, loss), pipeline):
            with pytest.raises(GeometryError, match=r"takes \(batch, 2, height, width\)"):
                call(wrong)
    with pytest.raises(ConfigError, match=r"the images are torch\.float32, but the weights torch\.float64"):
        pipeline(x_BCHW.float())
    with torch.autocast("cpu"), pytest.raises(ConfigError, match="autocast is on"):
        pipeline(x_BCHW)
    with pytest.raises(ConfigError, match=r"was made of torch\.float64 weights, which are torch\.float32 now"):
        pipeline.float()(x_BCHW.float())
    pipeline.double()
    with pytest.raises(ConfigError, match="2 images have 1 targets; give each image one"):
        pipeline.step(x_BCHW, target_BHW[:1], loss)
    pipeline.close()
