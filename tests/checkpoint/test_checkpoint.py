"""Checkpoints: back bit for bit, which of them a resume finds, and damaged ones found; nothing in them can run."""

import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import tiledseg
from tests.checkpoint.saved import FILES, make_network, save, seal, state_of, train
from tiledseg.checkpoint.folder import (
    MODEL,
    OPTIMIZER,
    contents_of,
    find_checkpoint,
    newest_checkpoint,
    newest_step,
    rewind,
    save_checkpoint,
)
from tiledseg.checkpoint.loading import load_network, load_optimizer
from tiledseg.comm.doing import changes
from tiledseg.config.run import OptimizerConfig
from tiledseg.errors import CheckpointError
from tiledseg.training.optimizer import build_optimizer


@pytest.mark.parametrize("config", [OptimizerConfig(), OptimizerConfig("sgd", momentum=0.9)])
def test_the_optimizer_s_state_has_the_strides_of_its_weights(tmp_path: Path, config: OptimizerConfig) -> None:
    """As the fused update needs: `tests/test_train.py` has the bits."""
    network = make_network(2)
    optimizer = build_optimizer(network.parameters(), config)
    train(network, optimizer, 1)
    save_checkpoint(tmp_path, contents_of(network, optimizer), state_of(1, config), keep=1)
    optimizer = build_optimizer(network.parameters(), config)
    load_optimizer(find_checkpoint(tmp_path), optimizer)
    assert [*optimizer.state] == [*network.parameters()]
    for weight, state in optimizer.state.items():
        assert {each.stride() for each in state.values() if each.shape == weight.shape} == {weight.stride()}


def test_weights_of_two_names_are_written_under_both(tmp_path: Path) -> None:
    """Without a copy they lie in one piece of memory, which safetensors refuses."""
    one = torch.arange(6.0)
    contents = {MODEL: {"a.bias": one, "b.bias": one, "c.bias": one[2:4]}, OPTIMIZER: {}}
    path = save_checkpoint(tmp_path, contents, state_of(1, OptimizerConfig()), keep=1)
    found = load_file(path / "model.safetensors")
    assert {k: v.tolist() for k, v in found.items()} == {k: v.tolist() for k, v in contents[MODEL].items()}


def test_a_network_of_another_shape_or_name_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found = find_checkpoint(tmp_path)
    name = "layers.bottom-conv0.weight"
    with pytest.raises(CheckpointError, match=rf"of another model: '{name}' is \(3, .*\) there and \(4, .*\) in this"):
        load_network(found, make_network(channels=4))
    with pytest.raises(CheckpointError, match=r"of another model: 'bias' is absent there and \(3,\) in this"):
        load_network(found, nn.Conv2d(2, 3, 3))


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    network = make_network()
    with pytest.raises(CheckpointError, match="another optimizer"):
        load_optimizer(find_checkpoint(tmp_path), build_optimizer(network.parameters(), OptimizerConfig(name="sgd")))
    fewer = build_optimizer(list(network.parameters())[1:], OptimizerConfig())
    with pytest.raises(CheckpointError, match=r"adamw of 5 parameters there, adamw of 4 param"):
        load_optimizer(find_checkpoint(tmp_path), fewer)
    optimizer = build_optimizer(network.parameters(), OptimizerConfig())
    train(network, optimizer, 1)
    contents = contents_of(network, optimizer)
    contents[OPTIMIZER] = {key: tensor for key, tensor in contents[OPTIMIZER].items() if not key.startswith("0.")}
    save_checkpoint(tmp_path, contents, state_of(2, OptimizerConfig()), keep=1)
    with pytest.raises(CheckpointError, match=r"adamw of 4 parameters there, adamw of 5 param"):
        load_optimizer(find_checkpoint(tmp_path), build_optimizer(network.parameters(), OptimizerConfig()))


# --- which checkpoint


def test_run_folder_checkpoints_folder_and_checkpoint_lead_to_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1)
    newest = save(folder, 2)
    assert (folder / "latest").read_text() == "step-000002\n"
    assert {find_checkpoint(path).path for path in (tmp_path, folder, newest)} == {newest}
    assert find_checkpoint(folder / "step-000001").saved.step == 1


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    """Also where a name has grown a digit; what is no checkpoint stays."""
    others = {"step-notes", "step-000001.bak", "latest"}
    for name in others - {"latest"}:
        (tmp_path / name).mkdir()
    steps = (1, 2, 999999, 1000000, 1000001)
    for step in steps:
        save_checkpoint(tmp_path, {MODEL: {"a": torch.ones(1)}, OPTIMIZER: {}}, state_of(step), keep)
    assert {path.name for path in tmp_path.iterdir()} == others | {f"step-{step:06d}" for step in steps[-keep:]}
    assert find_checkpoint(tmp_path).saved.step == 1000001


def test_a_save_counts_as_progress_at_each_sync_and_each_mebibyte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr("tiledseg.checkpoint.folder.flush", lambda path: seen.append(changes()))
    before = changes()
    save_checkpoint(tmp_path, {MODEL: {"a": torch.ones(1 << 20)}, OPTIMIZER: {}}, state_of(1), 1)
    assert seen[0] - before > 4, "the sums of 4 MiB"
    assert len(set(seen)) == len(seen) == 5


def test_resuming_takes_the_newest_whole_one(tmp_path: Path) -> None:
    """The tests of damage find the one before."""
    assert (newest_checkpoint(tmp_path), newest_step(tmp_path)) == (None, None)
    for step in (1, 2):
        (save(tmp_path, step) / "manifest.json").unlink()
    assert newest_step(tmp_path) == 2
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        newest_checkpoint(tmp_path)


def test_going_back_drops_what_came_later(tmp_path: Path) -> None:
    """A damaged newest one neither takes the place of those made anew nor is pointed at."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / ".partial-step-000004").mkdir()
    rewind(tmp_path, 2, None)
    assert find_checkpoint(tmp_path).saved.step == newest_step(tmp_path) == 2
    save(tmp_path, 3, keep=1)
    assert find_checkpoint(tmp_path).saved.step == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000003"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("whole"), 2)


@settings(
    derandomize=True, max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(name=st.sampled_from(FILES), at=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), cut=st.booleans())
def test_a_changed_byte_or_a_cut_is_found(
    whole: Path, tmp_path: Path, name: str, at: float, flip: int, cut: bool
) -> None:
    """Only the manifest's white space may change: its content is then still the same."""
    path = tmp_path / "step-000002"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(whole, path)
    data = bytearray((path / name).read_bytes())
    place = int(at * len(data))
    if cut:
        del data[place:]
    else:
        data[place] ^= flip
    (path / name).write_bytes(data)
    try:
        saved = find_checkpoint(path).saved
    except CheckpointError:
        return
    assert name == "manifest.json"
    assert saved == find_checkpoint(whole).saved


LATEST = {
    "elsewhere": (b"/step-000002\n", "no checkpoint's name"),
    "above": (b"..\n", "no checkpoint's name"),
    "empty": (b"", "no checkpoint's name"),
    "not-utf-8": (b"\xff\n", "no checkpoint's name"),
    "long": (b"x" * 5000, "holds 'x{40}', which is no checkpoint's name"),
    "no-such-step": (b"step-000099\n", "step-000099"),
}


@pytest.mark.parametrize("name", LATEST)
def test_latest_names_a_checkpoint_beside_it(whole: Path, tmp_path: Path, name: str) -> None:
    content, words = LATEST[name]
    shutil.copytree(whole, tmp_path / "step-000002")
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        find_checkpoint(tmp_path)


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a change of a checkpoint: `make` puts something in the place of the file `name`."""

    def change(step: Path) -> None:
        (step / name).unlink()
        make(step / name)

    return change


def edited(step: Path) -> None:
    path = step / "manifest.json"
    path.write_text(path.read_text().replace('"epoch": 0', '"epoch": 1'))


WEIGHTS, STATE, MANIFEST = FILES
ODD: dict[str, tuple[Callable[[Path], None], str]] = {
    "manifest-a-fifo": (replaced(MANIFEST, os.mkfifo), f"{MANIFEST} cannot be read (it is a FIFO)"),
    "weights-a-folder": (replaced(WEIGHTS, Path.mkdir), f"{WEIGHTS} is a folder"),
    "optimizer-to-nowhere": (replaced(STATE, lambda path: path.symlink_to("nowhere")), f"{STATE} is missing"),
    "weights-to-a-device": (replaced(WEIGHTS, lambda path: path.symlink_to("/dev/zero")), "is a character device"),
    "manifest-to-itself": (replaced(MANIFEST, lambda path: path.symlink_to(MANIFEST)), MANIFEST),
    "manifest-edited": (edited, f"{MANIFEST} does not match its checksum"),
    "manifest-without-format": (
        lambda step: seal(step, lambda manifest: manifest.pop("format")),
        "it states no format",
    ),
    "manifest-of-null": (lambda step: seal(step, lambda each: each.update(format=None)), "it states no format"),
    **{
        f"manifest-of-{text[:20]}": (replaced(MANIFEST, lambda path, text=text: path.write_text(text)), MANIFEST)  # type: ignore[misc]
        for text in ("[]", "3", '"text"', "{}", '{"format": 1}', '{"format": 1, "state": null}', "[" * 100_000)
    },
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.timeout(120)
def test_a_file_that_is_none_is_damage(whole: Path, tmp_path: Path, name: str) -> None:
    """A run that is resumed takes the older checkpoint, and says why."""
    change, words = ODD[name]
    save(tmp_path, 3)
    shutil.copytree(whole, tmp_path / "step-000002")
    change(tmp_path / "step-000003")
    with pytest.raises(CheckpointError, match=re.escape(words)):
        find_checkpoint(tmp_path)
    older = newest_checkpoint(tmp_path)
    assert older is not None
    assert older.saved.step == 2
    assert words in older.passed_over[0]


class Bomb:
    """Leaves a file where somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, int]]:
        return os.open, (str(self.path), os.O_CREAT)


@pytest.mark.parametrize("name", FILES[:2])
def test_a_pickle_with_the_right_checksum_is_not_run(whole: Path, tmp_path: Path, name: str) -> None:
    path, trace = shutil.copytree(whole, tmp_path / "step-000002"), tmp_path / "trace"
    (path / name).write_bytes(pickle.dumps(Bomb(trace)))
    seal(path, lambda manifest: None)
    network = make_network()
    optimizer = build_optimizer(network.parameters(), OptimizerConfig())
    saved = find_checkpoint(path)
    with pytest.raises(CheckpointError, match=name):
        load_network(saved, network) if name == FILES[0] else load_optimizer(saved, optimizer)
    assert not trace.exists()
    os.close(pickle.loads(pickle.dumps(Bomb(trace))))
    assert trace.exists(), "the bomb of this test is none"


def test_no_module_reads_pickles() -> None:
    """Objects travel between the ranks of one job only, through torch.distributed and mpi4py."""
    sources = sorted(Path(next(iter(tiledseg.__path__))).rglob("*.py"))
    assert len(sources) > 50
    for path in sources:
        text = path.read_text()
        if path.name == "loading.py":  # torch's files as weights only, and what the reader raises for others
            for known in ("import pickle\n", "pickle.UnpicklingError", 'torch.load(path, "cpu", weights_only=True)'):
                assert text.count(known) == 1
                text = text.replace(known, "")
        if path.name == "state.py":  # writes the state of generators, to compare it
            text = text.replace("import pickle\n", "", 1).replace("pickle.dumps(", "", 1)
        if path.name == "zarr_store.py":  # refuses a store's codec of that name
            text = text.replace("Not pickle, which", "", 1)
        found = re.findall(r"torch\.load\b|\bpickle\b|\bmarshal\b|\beval\(|\bexec\(|allow_pickle", text)
        found = [word for word in found if word != "eval("] + re.findall(r"(?<![.\w])eval\(", text)
        assert not found, f"{path}: {found}"
