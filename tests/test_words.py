"""Words that must not come back: one meaning a word, and plain sentences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLAIN = {
    "for ever": "forever",
    "as the protocol says": "say what the method does, or nothing",
    "behind it": "after it",
    "behind them": "after them",
}


def texts() -> dict[str, str]:
    """Programs and pages of the project by name, in small letters, blanks and ends of lines alike."""
    suffixes = (".py", ".md", ".yaml", ".toml")
    found = [
        path
        for room in ("tiledseg", "benchmarks", "tests", "docs", ".")
        for path in sorted((ROOT / room).glob("*" if room == "." else "**/*"))
        if path.suffix in suffixes and path != Path(__file__).resolve() and path.is_file()
    ]
    return {str(path.relative_to(ROOT)): " ".join(path.read_text().lower().split()) for path in found}


@pytest.mark.parametrize("words", PLAIN)
def test_words_stay_away(words: str) -> None:
    pattern = re.compile(rf"(?<!\w){re.escape(words)}(?!\w)")
    found = [name for name, text in texts().items() if pattern.search(text)]
    assert not found, f"'{words}' in {', '.join(found)}: {PLAIN[words]}"


def test_no_benchmark_changes_the_import_path() -> None:
    assert [name for name, text in texts().items() if name.startswith("benchmarks/") and "sys.path" in text] == []
