from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tiledseg.checkpoint.loading import read_state_dict, strip_prefixes
from tiledseg.errors import CheckpointError
from tiledseg.inference.trained import fill

STATE = {"conv1.weight": torch.arange(6.0).view(1, 6, 1, 1), "bn1.num_batches_tracked": torch.tensor(3)}


def _same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == STATE.keys() and all(torch.equal(found[name], STATE[name]) for name in STATE)


def test_each_format_gives_the_same_tensors(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "a.safetensors")
    torch.save(STATE, tmp_path / "b.pth")
    torch.save(STATE, tmp_path / "legacy.pth", _use_new_zipfile_serialization=False)
    torch.save({"epoch": 3, "state_dict": STATE}, tmp_path / "c.pth")
    torch.save({"model": STATE, "optimizer": {"lr": 0.1}}, tmp_path / "d.bin")
    assert all(_same(read_state_dict(path)) for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 5


class _Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit(9)",))


def test_what_is_no_state_dict_is_refused_in_one_line(tmp_path: Path) -> None:
    whole, cut, text, harmful, other, empty, nested = (tmp_path / name for name in "abcdefg")
    torch.save(STATE, whole)
    cut.write_bytes(whole.read_bytes()[:-100])
    text.write_text("no weights at all")
    harmful.write_bytes(pickle.dumps({"a": _Harmful()}, protocol=2))
    torch.save([1, 2], other)
    empty.write_bytes(b"")
    torch.save({"a": {"b": STATE}}, nested)
    for path in (cut, text, harmful, other, empty, nested, tmp_path / "missing", tmp_path):
        with pytest.raises(CheckpointError, match=r"give .*(state dict|file of weights)") as caught:
            read_state_dict(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_prefixes_of_wrappers_are_stripped_where_that_leads_to_a_wanted_name() -> None:
    one = torch.zeros(1)
    given = {"module.encoder.conv1.weight": one, "module.decoder.weight": one, "encoder.conv": one}
    assert set(strip_prefixes(given, {"conv1.weight", "encoder.conv"})) == {
        "conv1.weight",
        "decoder.weight",
        "encoder.conv",
    }
    with pytest.raises(CheckpointError, match="two tensors of the file are 'conv'"):
        strip_prefixes({"module.conv": one, "conv": one}, {"conv"})


def _odd_tensors() -> dict[str, torch.Tensor]:
    plain = torch.ones(2, 3, 1, 1)
    return {
        "complex64, strided": plain.to(torch.complex64),
        "int64, strided": plain.to(torch.int64),
        "uint64, strided": plain.to(torch.uint64),
        "float8_e4m3fn, strided": plain.to(torch.float8_e4m3fn),
        "float32, sparse_coo": plain.to_sparse(),
        "qint8, strided": torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8),
        "float32, meta": plain.to("meta"),
        "float32, nested": torch.nested.nested_tensor([plain[0], plain[1]]),
    }


@pytest.mark.parametrize("kind", _odd_tensors())
def test_tensors_that_copying_would_change_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 1), torch.nn.BatchNorm2d(2))
    path = tmp_path / "a.pth"
    torch.save({**module.state_dict(), "0.weight": _odd_tensors()[kind]}, path)
    words = rf"a.pth: '0.weight' is torch.{kind.replace(' ', ' (torch.)?')}, of the network's torch.float32; give"
    if "nested" in kind and torch.__version__ >= "2.15":
        words = "a.pth cannot be read as weights"  # newer loaders take none
    with pytest.raises(CheckpointError, match=words):
        fill(module, str(path))
    torch.save({**module.state_dict(), "1.num_batches_tracked": torch.tensor(1.5)}, path)
    with pytest.raises(CheckpointError, match=r"'1.num_batches_tracked' is torch.float32, torch.strided, of the"):
        fill(module, str(path))
