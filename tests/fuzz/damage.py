"""Damage to the bytes of a file: what disks, copies and editors do."""

from __future__ import annotations

import random
from pathlib import Path


def damage_bytes(data: bytes, draw: random.Random) -> bytes:
    """One to three changes of a file's bytes."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        data = draw.choice((_flip, _flip, _flip_head, _cut, _extend, _zero, _swap, _repeat, _set))(data, draw)
    return data


def damage_file(path: Path, draw: random.Random) -> str:
    """Damages a file in place; says which."""
    path.write_bytes(damage_bytes(path.read_bytes(), draw))
    return f"bytes of {path}"


def _flip(data: bytes, draw: random.Random, span: int | None = None) -> bytes:
    if not data:
        return data
    place = draw.randrange(min(len(data), span or len(data)))
    return data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]


def _flip_head(data: bytes, draw: random.Random) -> bytes:
    return _flip(data, draw, 400)


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)] if draw.random() < 0.7 else data[:-1]


def _extend(data: bytes, draw: random.Random) -> bytes:
    return data + draw.randbytes(draw.choice((1, 16, 700)))


def _zero(data: bytes, draw: random.Random) -> bytes:
    start, size = draw.randrange(len(data) + 1), draw.choice((1, 8, 512))
    return data[:start] + bytes(min(size, len(data) - start)) + data[start + size :]


def _swap(data: bytes, draw: random.Random) -> bytes:
    a, b = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return data[:a] + data[a:b][::-1] + data[b:]


def _repeat(data: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(data) + 1)
    return data[: start + 64] + data[start:]


def _set(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data) + 1)
    return data[:place] + draw.choice((b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b"\x00", b"\n")) + data[place + 4 :]
