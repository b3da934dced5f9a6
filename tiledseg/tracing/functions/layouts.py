"""What views do: dims of a tensor named, moved, merged and split, and nothing computed.

A tensor of the graph always is (batch, channels, height, width). Its author may see it in another layout: as channels
last, as tokens, as one pixel. A layout is found for every view, or none is known, and the view is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tiledseg.geometry.layers.pixelwise import Layout

Dims = tuple[tuple[str, ...], ...]
PIXELS = ("H", "W")


def sizes_of(layout: Layout, shape: Sequence[int], pixels: tuple[int, int]) -> dict[str, int]:
    """Of each name its size, for a tensor that its author sees in this layout and shape; `pixels`: its rows and
    columns."""
    found = dict(zip(PIXELS, (1, 1) if layout.one_pixel else pixels, strict=True))
    found |= {f"C{index}": size for index, size in enumerate(layout.channels)}
    for dim, size in zip(layout.dims, shape, strict=True):
        for atom in dim:
            if atom in found:
                size //= found[atom]
        found |= {atom: size for atom in dim if atom not in found}
    return found


def permuted(layout: Layout, order: Sequence[int]) -> Layout:
    count = len(layout.dims)
    return replace(layout, dims=tuple(layout.dims[at % count] for at in order))


def is_pixels(dim: Sequence[str]) -> bool:
    """Whether a dim holds pixels, or nothing."""
    return all(atom in PIXELS for atom in dim)


def is_channels(dim: Sequence[str]) -> bool:
    return bool(dim) and all(atom.startswith("C") for atom in dim)


def reshaped(layout: Layout, sizes: dict[str, int], shape: Sequence[int]) -> Layout | None:
    """The layout after a reshape to `shape`; None where it takes pixels apart, or mixes them with other dims."""
    atoms = [(atom, sizes[atom]) for dim in layout.dims for atom in dim]
    dims: list[list[tuple[str, int]]] = []
    for size in shape:
        dim: list[tuple[str, int]] = []
        product = 1
        while atoms and product < size:
            atom, own = atoms.pop(0)
            if product * own > size:
                if size % product or not atom.startswith("C") or (own * product) % size:
                    return None
                part = size // product
                dim.append((atom + "a", part))
                atoms.insert(0, (atom + "b", own // part))
                product = size
                break
            dim.append((atom, own))
            product *= own
        if product != size:
            return None
        dims.append(dim)
    if any(own > 1 for _, own in atoms):
        return None
    for atom, own in atoms:  # a single channel, wherever there is room
        free = next((dim for dim, size in zip(dims, shape, strict=True) if size == 1 and not dim), [])
        free.append((atom, own))
    return with_channels(_renamed(layout, dims, sizes))


def with_channels(layout: Layout) -> Layout:
    """Where all channels have been reduced to one, the first dim of size 1 is that one's."""
    if layout.one_pixel or any(atom.startswith("C") for dim in layout.dims for atom in dim) or () not in layout.dims:
        return layout
    at = layout.dims.index(())
    return replace(layout, dims=(*layout.dims[:at], ("C0",), *layout.dims[at + 1 :]))


def _renamed(layout: Layout, dims: list[list[tuple[str, int]]], sizes: dict[str, int]) -> Layout:
    """Channels numbered anew, in the order of the tensor's own channels."""
    before = [name for name in sorted(sizes) if name.startswith("C")]
    parts = {atom: size for dim in dims for atom, size in dim if atom.startswith("C")}
    ordered = sorted(parts, key=lambda atom: (before.index(atom.rstrip("ab")), atom.lstrip("C0123456789")))
    names = {atom: f"C{index}" for index, atom in enumerate(ordered)}
    made = tuple(tuple(names.get(atom, atom) for atom, _ in dim) for dim in dims)
    together = tuple(names.values())
    if len(together) > 1 and together in made:  # all of them again, in their order
        return replace(layout, dims=tuple(("C0",) if dim == together else dim for dim in made), channels=())
    factors = tuple(parts[atom] for atom in ordered) if len(ordered) > 1 else ()
    return replace(layout, dims=made, channels=factors)
