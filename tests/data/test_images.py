from __future__ import annotations

import numpy as np
import pytest
import torch

from feddf.data.datasets import Pixels, flip_crop, plain
from feddf.data.unlabeled import choose, match_inputs, noise, shifted, with_views
from feddf.types import Inputs


@pytest.mark.parametrize(("side", "most"), [(32, 4), (16, 2)])
def test_every_augmented_image_is_a_possibly_mirrored_crop(side: int, most: int) -> None:
    """It is moved by an eighth of its side at the most: the paper's ±4 of 32, and ±2 of 16."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (64, 3, side, side), generator=generator, dtype=torch.uint8)
    seen = set()
    for original, image in zip(images.numpy(), flip_crop(images, generator).numpy(), strict=True):
        padded = np.pad(original, ((0, 0), (most, most), (most, most)))
        found = [
            (top, left, flip)
            for top in range(2 * most + 1)
            for left in range(2 * most + 1)
            for flip in (1, -1)
            if np.array_equal(padded[:, top : top + side, left : left + side][:, :, ::flip], image)
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 30  # all over the place, both ways round
    assert {flip for _, _, flip in seen} == {1, -1}


def test_augmentation_is_seeded_and_leaves_its_input_alone() -> None:
    images = torch.arange(2 * 64, dtype=torch.uint8).reshape(2, 1, 8, 8)
    before = images.clone()
    one, two = (flip_crop(images, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(images, before)
    assert one.dtype == torch.uint8


def test_pixels_are_normalized_by_channel() -> None:
    raw = torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8).reshape(1, 2, 1, 2)
    encoded = Pixels((0.5, 0.2), (0.25, 0.1))(raw)
    torch.testing.assert_close(encoded.flatten(), torch.tensor([-2.0, 2.0, 0.0, 2.0]), atol=1e-6, rtol=0)


def test_a_pool_takes_the_shape_and_the_encoding_of_the_models() -> None:
    like = Inputs(torch.zeros(1, 3, 16, 16, dtype=torch.uint8), Pixels((0.5,) * 3, (0.5,) * 3))
    gray = torch.full((5, 1, 8, 8), 100, dtype=torch.uint8)
    pool = match_inputs(gray, like)
    assert pool.raw.shape == (5, 3, 16, 16)
    assert bool((pool.raw == 100).all())
    assert pool.encode is like.encode
    color = torch.tensor([30, 60, 90], dtype=torch.uint8).reshape(1, 3, 1, 1).expand(2, 3, 4, 4)
    mono = match_inputs(color, Inputs(torch.zeros(1, 1, 4, 4, dtype=torch.uint8), plain))
    assert bool((mono.raw == 60).all())


def test_float_images_stay_floats() -> None:
    like = Inputs(torch.zeros(1, 1, 8, 8), plain)
    pool = match_inputs(torch.full((2, 1, 4, 4), 0.25), like)
    assert bool((pool.raw == 0.25).all())
    with pytest.raises(ValueError, match=r"uint8 cannot stand in for inputs of type torch\.float32"):
        match_inputs(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), like)


@pytest.mark.parametrize("shape", [(4, 2), (4, 2, 8, 8)])
def test_a_pool_of_the_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    like = Inputs(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), plain)
    with pytest.raises(ValueError, match="cannot stand in for"):
        match_inputs(torch.zeros(shape, dtype=torch.uint8), like)


def test_choose_takes_each_input_once() -> None:
    source = torch.arange(100)
    chosen = choose(source, 30, seed=1)
    assert len(set(chosen.tolist())) == 30
    assert torch.equal(choose(source, None, seed=1), source)
    with pytest.raises(ValueError, match="101 inputs were asked for, and the source has 100"):
        choose(source, 101, seed=1)


def test_uniform_points_lie_in_the_square() -> None:
    points = noise((2,), torch.float32, 1000, seed=0)
    assert points.shape == (1000, 2)
    assert -3 <= points.min() < -2.9
    assert 2.9 < points.max() <= 3


def by_hand(image: np.ndarray, dy: int, dx: int) -> np.ndarray:
    """One shifted image, pixel by pixel, reflected at the edges."""
    _, height, width = image.shape
    shifted = np.empty_like(image)
    for y in range(height):
        for x in range(width):
            from_y, from_x = abs(y + dy), abs(x + dx)
            from_y = from_y if from_y < height else 2 * (height - 1) - from_y
            from_x = from_x if from_x < width else 2 * (width - 1) - from_x
            shifted[:, y, x] = image[:, from_y, from_x]
    return shifted


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_images_are_shifted_by_up_to_a_quarter(dtype: torch.dtype) -> None:
    images = torch.randint(0, 256, (90, 3, 8, 12), generator=torch.Generator().manual_seed(1)).to(dtype)
    moves = {(dy, dx) for dy in range(-2, 3) for dx in range(-3, 4)}
    found = shifted(images, torch.Generator().manual_seed(2), flips=False)
    taken = set()
    for image, moved in zip(images.numpy(), found.numpy(), strict=True):
        fitting = [move for move in moves if np.array_equal(by_hand(image, *move), moved)]
        assert fitting, "it is the image, moved"
        taken |= set(fitting)
    assert len(taken) > 25, "most of the 35 moves are taken"


def test_a_mirrored_image_is_the_mirror_of_the_same_shift() -> None:
    images = torch.rand(40, 1, 6, 6)
    plain, mirrored = (shifted(images, torch.Generator().manual_seed(3), flips) for flips in (False, True))
    same = [torch.equal(one, other) for one, other in zip(plain, mirrored, strict=True)]
    turned = [torch.equal(one.flip(2), other) for one, other in zip(plain, mirrored, strict=True)]
    assert all(one or other for one, other in zip(same, turned, strict=True))
    assert 5 < sum(same) < 35


def test_views_are_the_images_and_copies_of_each_in_the_same_order() -> None:
    images = torch.randint(0, 256, (9, 1, 8, 8), dtype=torch.uint8)
    images[:, :, 2:6, 2:6] = torch.arange(9, dtype=torch.uint8).view(9, 1, 1, 1) * 25  # each has a level of its own
    one, two = (with_views(images, 3, False, seed=5) for _ in range(2))
    assert torch.equal(one, two)
    assert len(one) == 27
    assert torch.equal(one[:9], images)
    assert not torch.equal(one[9:18], one[18:])
    assert not torch.equal(one, with_views(images, 3, False, seed=6))
