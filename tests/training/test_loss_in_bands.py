"""The loss of a tile, taken some rows at a time by all cores: the bits are those of the loss of all pixels at once."""

from __future__ import annotations

import pytest
import torch

from tiledseg.tracing.allocations import AllocationMeter
from tiledseg.training.losses import in_bands
from tiledseg.training.losses.objective import PixelTerms, Sums, pixel_sums

TERMS = {
    "cross-entropy": (PixelTerms(), ()),
    "weighted, smoothed": (PixelTerms(smoothing=0.1), (0.5, 2.0, 0.0, 1.0, 3.0, 1.0, 1.0, 2.0, 1.0)),
    "focal too": (PixelTerms(0.5, 1.5), (0.5, 2.0, 0.0, 1.0, 3.0, 1.0, 1.0, 2.0, 1.0)),
}


def tile(classes: int, images: int = 1, height: int = 37, width: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(classes)
    logits_BKHW = 4 * torch.randn(images, classes, height, width, generator=draw)
    target_BHW = torch.randint(0, classes, (images, height, width), generator=draw, dtype=torch.uint8)
    target_BHW[:, 3:9] = 255
    return logits_BKHW.contiguous(memory_format=torch.channels_last), target_BHW


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("classes", [2, 5, 9])
@pytest.mark.parametrize("images", [1, 2])
def test_sums_and_gradients_are_those_of_all_pixels_at_once(
    images: int, classes: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any number of threads; a core that is a view of its context, too."""
    terms, weights = TERMS[name]
    logits_BKHW, target_BHW = tile(classes, images, 41, 36)
    logits_BKHW, target_BHW = logits_BKHW[:, :, 2:39, 2:34], target_BHW[:, 2:39, 2:34]
    before, found = torch.get_num_threads(), []
    try:
        for pixels, threads in ((1 << 20, 1), (64, 1), (64, 2), (64, 3)):
            torch.set_num_threads(threads)
            monkeypatch.setattr(in_bands, "_PIXELS", pixels)
            own_BKHW = logits_BKHW.detach().requires_grad_()
            total, weight = pixel_sums(own_BKHW, target_BHW, 255, weights[:classes], terms)
            assert ("Summed" in type(total.grad_fn).__name__) == (pixels == 64)
            assert total.dtype == torch.float64
            found.append((total.detach(), weight, torch.autograd.grad(total, own_BKHW)[0]))
    finally:
        torch.set_num_threads(before)
    whole = found[0]
    for total, weight, slopes_BKHW in found[1:]:
        assert total.item() == found[1][0].item() == pytest.approx(whole[0].item(), rel=1e-13)
        assert torch.equal(weight, whole[1])
        assert torch.equal(slopes_BKHW, whole[2])
        assert slopes_BKHW.is_contiguous(memory_format=torch.channels_last)


@pytest.fixture
def small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_bands, "_PIXELS", 64)


def of_tile() -> tuple[torch.Tensor, Sums]:
    logits_BKHW, target_BHW = tile(5)
    logits_BKHW.requires_grad_()
    return logits_BKHW, pixel_sums(logits_BKHW, target_BHW, 255)


@pytest.mark.usefixtures("small_bands")
def test_a_factor_of_the_loss_is_that_of_its_gradient_again_and_again() -> None:
    logits_BKHW, (total, _) = of_tile()
    once, thrice = (torch.autograd.grad(f * total, logits_BKHW, retain_graph=True)[0] for f in (1, 3))
    torch.testing.assert_close(thrice, 3 * once)
    again = torch.autograd.grad(total, logits_BKHW)[0]
    assert torch.equal(again, once)


@pytest.mark.usefixtures("small_bands")
def test_without_gradients_and_for_who_follows_or_keeps_tensors_the_sums_are_the_same() -> None:
    logits_BKHW, (total, _) = of_tile()
    target_BHW = tile(5)[1]
    with torch.no_grad():
        found = [pixel_sums(logits_BKHW, target_BHW, 255)[0]]
    assert not found[0].requires_grad
    with torch.inference_mode():
        found.append(pixel_sums(logits_BKHW, target_BHW, 255)[0].clone())
    with AllocationMeter([logits_BKHW]):
        found.append(pixel_sums(logits_BKHW, target_BHW, 255)[0])
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        found.append(pixel_sums(logits_BKHW, target_BHW, 255)[0])
    assert all("Summed" not in type(each.grad_fn).__name__ for each in found[2:])
    assert kept, "others' hooks see what the loss keeps, as ever"
    assert [each.item() for each in found] == pytest.approx([total.item()] * 4, rel=1e-13)


@pytest.mark.usefixtures("small_bands")
def test_an_error_in_a_band_is_raised() -> None:
    logits_BKHW, target_BHW = tile(5)
    target_BHW[0, 30, 3] = 77
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with pytest.raises(IndexError, match="Target 77 is out of bounds"):
                pixel_sums(logits_BKHW.requires_grad_(), target_BHW, 255)
        finally:
            torch.set_num_threads(before)
