from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tiledseg.checkpoint.weights_file import read_state_dict, strip_prefixes
from tiledseg.errors import CheckpointError

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
