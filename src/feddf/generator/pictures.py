"""Images from files and to files, as N × C × H × W bytes."""

from __future__ import annotations

import io
from math import ceil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from feddf.data.files import SUFFIXES, read_image
from feddf.generator.generator_folder import GeneratorError
from feddf.models.dcgan import SIDE


def read_images(folder: Path) -> Tensor:
    """Return every image in a folder and the folders below it, in the order of their paths, in colour and 32×32.

    Each is cut to a square; resizing is bilinear, with antialiasing. Class folders are just folders here.
    """
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise GeneratorError(f"{folder} holds no images; known are files that end in {', '.join(SUFFIXES)}")
    try:
        pixels = np.stack([read_image(path, SIDE) for path in files])
    except ValueError as error:
        raise GeneratorError(str(error)) from error
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def png(image: Tensor) -> bytes:
    """Return one image, C × H × W bytes in grey or colour, as the content of a PNG file."""
    from matplotlib.image import imsave  # here: who only samples does not wait for it

    if image.shape[0] not in (1, 3):
        raise ValueError(f"an image of {image.shape[0]} channels cannot be drawn, only one of 1 or 3")
    content = io.BytesIO()
    imsave(content, image.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy(), format="png")
    return content.getvalue()


def sheet(images: Tensor, columns: int = 8, zoom: int = 3, gap: int = 1) -> Tensor:
    """Return images side by side, row by row, as one image on white, each pixel ``zoom`` wide."""
    n, channels, height, width = images.shape
    rows = ceil(n / columns)
    padded = F.pad(images, (0, gap, 0, gap), value=255)
    blank = padded.new_full((rows * columns - n, *padded.shape[1:]), 255)
    grid = torch.cat([padded, blank]).view(rows, columns, channels, height + gap, width + gap)
    joined = grid.permute(2, 0, 3, 1, 4).reshape(channels, rows * (height + gap), columns * (width + gap))
    return joined.repeat_interleave(zoom, 1).repeat_interleave(zoom, 2)
