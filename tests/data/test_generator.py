"""Images of a generator: samples of a module or of an exported program, and the example that trains one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from feddf.data.unlabeled import load_generator, sample_images

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_generator.py"


def painter() -> nn.Module:
    """Latents of 5 numbers to images 2 × 3 × 4, by way of BatchNorm, which has two modes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Unflatten(1, (2, 3, 4)))


def test_a_sample_is_decided_by_its_seed_and_begins_like_a_larger_one() -> None:
    generator = painter().train()
    one, same, other, larger = (
        sample_images(generator, n, (5,), seed) for n, seed in ((9, 1), (9, 1), (9, 2), (300, 1))
    )
    assert one.dtype == torch.uint8
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(larger[:9], one)
    assert not torch.equal(larger[256:265], one)
    assert generator.training
    assert not generator[1].running_mean.any()  # eval mode: no statistic has moved


def test_bytes_are_rounded_and_cover_the_whole_range() -> None:
    values = torch.tensor([-7.0, -1.0, -0.5, 0.0, 1 / 255, 0.5, 1.0, 7.0])
    images = sample_images(lambda latents: values.expand(len(latents), 1, 1, 8), 1, (3,), 0)
    assert images.flatten().tolist() == [0, 0, 64, 128, 128, 191, 255, 255]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (torch.zeros(256, 3, 32), r"N × C × H × W images, got shape \(256, 3, 32\)"),
        (torch.zeros(3, 3, 8, 8), r"got shape \(3, 3, 8, 8\) for 256 latents"),
        (torch.full((256, 3, 2, 2), torch.nan), "finite"),
        ([1], "a tensor of N × C × H × W images, got a list"),
    ],
)
def test_an_answer_that_is_no_images_is_refused(answer: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sample_images(lambda latents: answer, 2, (4,), 0)


class Tiny(nn.Module):
    """Latents 2 × 3 to images 1 × 2 × 3."""

    def forward(self, latents: Tensor) -> Tensor:
        return torch.tanh(latents).unsqueeze(1)


@pytest.mark.parametrize(
    ("size", "dynamic"),
    [
        (4, None),
        (100, None),
        (300, None),
        (4, {0: torch.export.Dim.DYNAMIC}),
        (4, {0: torch.export.Dim("batch", max=60)}),
    ],
)
def test_an_exported_program_makes_what_its_module_makes(size: int, dynamic: Any, tmp_path: Path) -> None:
    """Whatever sizes of batch it was exported for."""
    shapes = (dynamic,) if dynamic else None
    program = torch.export.export(Tiny(), (torch.zeros(size, 2, 3),), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "tiny.pt2")
    made, latent = load_generator(tmp_path / "tiny.pt2", trust=True)
    assert latent == (2, 3)
    assert torch.equal(sample_images(made, 300, latent, 5), sample_images(Tiny(), 300, latent, 5))


def test_a_program_that_takes_something_else_than_latents_is_refused(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            return one + other

    torch.export.save(torch.export.export(Sum(), (torch.zeros(2, 3), torch.zeros(2, 3))), tmp_path / "sum.pt2")
    with pytest.raises(ValueError, match="must take one argument, a batch of latents"):
        load_generator(tmp_path / "sum.pt2", trust=True)


@pytest.mark.parametrize("name", ["broken.pt2", "missing.pt2", "folder", "folder.pt2", "generator.safetensors"])
def test_what_is_no_generator_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "broken.pt2").write_bytes(b"nothing")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.pt2").mkdir()
    (tmp_path / "generator.safetensors").write_bytes(b"nothing")
    with pytest.raises(
        ValueError, match=rf"{name} is not a (generator|whole program).*(\.pt2|torch\.export\.save)"
    ) as raised:
        load_generator(tmp_path / name, trust=True)
    assert "\n" not in str(raised.value)


def test_the_example_trains_a_generator_that_can_be_read(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "2", "--batch-size", "4", "--width", "2", "--out", "made.pt2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made.png").is_file()
    made, latent = load_generator(tmp_path / "made.pt2", trust=True)
    assert latent == (100,)
    assert sample_images(made, 3, latent, 0).shape == (3, 1, 32, 32)


def test_the_examples_generator_learns_from_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    import train_generator

    bright = torch.full((16, 1, 32, 32), 0.7)

    def distance(steps: int) -> float:
        torch.manual_seed(0)
        generator = train_generator.train(bright, steps, batch_size=8, lr=4e-3, width=4, device="cpu")
        with torch.no_grad():
            return float((generator(torch.randn(32, 100)).mean(dim=(1, 2, 3)) - 0.7).abs().mean())

    assert distance(100) < distance(1) / 2
