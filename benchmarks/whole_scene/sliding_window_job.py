"""A map as a user of MONAI makes it. `python -m benchmarks.whole_scene.sliding_window` starts it.

    python -m benchmarks.whole_scene.sliding_window_job CHECKPOINT IMAGE OUTPUT [--kept] [--channels-last]

Without MONAI its sliding window is written here as its documentation describes it: windows begin at multiples of the
interval, the last one ends with the image; where windows overlap, scores are the mean (its default, constant weights).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator

import numpy as np
import rasterio
import torch

from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.inference.trained import load_trained
from tiledseg.system.freed_memory import keep_freed_memory

WINDOW, OVERLAP, AT_ONCE = 512, 0.25, 4
Predictor = Callable[[torch.Tensor], torch.Tensor]


def starts(side: int) -> list[int]:
    """Where windows begin along a side."""
    interval = int(WINDOW * (1 - OVERLAP))
    count = max(-(-(side - WINDOW) // interval) + 1, 1)
    return [max(min(number * interval, side - WINDOW), 0) for number in range(count)]


def sliding_window(x_BCHW: torch.Tensor, predictor: Predictor) -> torch.Tensor:
    """Scores of an image at least a window large, of all windows that see a pixel the mean."""
    places = [(row, col) for row in starts(x_BCHW.shape[2]) for col in starts(x_BCHW.shape[3])]
    total_BKHW, seen_HW = torch.empty(0), torch.zeros(x_BCHW.shape[2:])
    for batch in _batches(places):
        windows_BCHW = torch.cat([x_BCHW[:, :, r : r + WINDOW, c : c + WINDOW] for r, c in batch])
        scores_BKHW = predictor(windows_BCHW)
        if not total_BKHW.numel():
            total_BKHW = torch.zeros(1, scores_BKHW.shape[1], *x_BCHW.shape[2:])
        for (r, c), scores_KHW in zip(batch, scores_BKHW, strict=True):
            total_BKHW[0, :, r : r + WINDOW, c : c + WINDOW] += scores_KHW
            seen_HW[r : r + WINDOW, c : c + WINDOW] += 1
    return total_BKHW.div_(seen_HW)


def _batches(places: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    for first in range(0, len(places), AT_ONCE):
        yield places[first : first + AT_ONCE]


def predicted(x_BCHW: torch.Tensor, predictor: Predictor) -> torch.Tensor:
    """By MONAI where it is there, else by `sliding_window`."""
    try:
        from monai.inferers import sliding_window_inference
    except ImportError:
        return sliding_window(x_BCHW, predictor)
    scores_BKHW = sliding_window_inference(x_BCHW, WINDOW, AT_ONCE, predictor, overlap=OVERLAP)
    return torch.as_tensor(scores_BKHW)  # no copy; MONAI types tuples of outputs too


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("image")
    parser.add_argument("output")
    parser.add_argument("--kept", action="store_true")
    parser.add_argument("--channels-last", action="store_true")
    options = parser.parse_args()
    if options.kept:
        keep_freed_memory(os.environ)
    checkpoint = find_checkpoint(options.checkpoint)
    network = load_trained(checkpoint, checkpoint.saved.network).eval()
    layout = torch.channels_last if options.channels_last else torch.contiguous_format
    network.to(memory_format=layout)  # type: ignore[call-overload]  # torch's stub lacks it
    with rasterio.open(options.image) as image:
        profile, x_CHW = image.profile, image.read().astype(np.float32)
    normalization = checkpoint.saved.normalization
    x_CHW -= np.array(normalization.mean, np.float32)[:, None, None]
    x_CHW /= np.array(normalization.std, np.float32)[:, None, None]
    with torch.inference_mode():
        predictor: Predictor = lambda x_BCHW: network(x_BCHW.contiguous(memory_format=layout))  # noqa: E731
        classes_HW = predicted(torch.from_numpy(x_CHW)[None], predictor).argmax(1)[0].to(torch.uint8)
    with rasterio.open(options.output, "w", **{**profile, "count": 1, "dtype": "uint8", "nodata": None}) as made:
        made.write(classes_HW.numpy(), 1)


if __name__ == "__main__":
    main()
