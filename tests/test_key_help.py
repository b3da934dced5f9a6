"""Help of configuration keys: few by default, all, a group, or one with its example."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tiledseg.commands.key_help import KEYS, MAIN, default, example, help_of_key, keys_to_show, takes
from tiledseg.commands.options import parse_config
from tiledseg.errors import ConfigError


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_config(["--help", *words], "tiledseg train", "Train.")
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_help_shows_the_main_keys_on_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = said(capsys)
    assert [key for key in KEYS if f"--{key} " in text] == sorted(MAIN, key=list(KEYS).index)
    assert "--help all" in text
    assert max(map(len, text.splitlines())) <= 80
    whole = said(capsys, "all")
    assert all(f"--{key} " in whole for key in KEYS)
    assert max(map(len, whole.splitlines())) <= 80


def test_a_group_or_a_key_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert keys_to_show(["--help", "tiling"]) == ["tiling.grid", "tiling.halo"]
    assert said(capsys, "train.ema").rstrip() == help_of_key("train.ema")
    assert said(capsys, "--train.ema") == said(capsys, "train.ema")
    assert keys_to_show(["--config", "a.yaml"]) is None
    with pytest.raises(ConfigError, match="--help has no 'grid'; give all, a group"):
        keys_to_show(["--help", "grid"])


@pytest.mark.parametrize("key", KEYS)
def test_each_key_has_a_default_values_and_an_example_that_it_takes(key: str, tmp_path: Path) -> None:
    """Other keys may be missing beside the example; the value itself is of a kind that the key takes."""
    assert default(KEYS[key])
    assert takes(KEYS[key])
    group, _, name = key.partition(".")
    assert list(yaml.safe_load(example(key))[group]) == [name]
    (tmp_path / "run.yaml").write_text(example(key))
    config = parse_config(["--config", str(tmp_path / "run.yaml")], "tiledseg train", "Train.")
    assert hasattr(getattr(config, group), name)
