"""The generator of unlabeled images: its shapes, its training, its folder, its samples and its commands."""

from __future__ import annotations

import hashlib
import io
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread, imsave
from torch import Tensor, nn

from feddf.generator import GeneratorError, load_generator, sample_images, train_generator, training
from feddf.generator.generator_folder import GeneratorFolder
from feddf.generator.pictures import png, read_images, sheet
from feddf.models.dcgan import Discriminator, Generator
from feddf.runtime.atomic import read_json_lines
from feddf.runtime.device import CPU
from test_cli import feddf

STEPS = 7
COLOURS = torch.tensor([[220, 40, 40], [30, 60, 200]], dtype=torch.uint8)


def flat(n: int = 40) -> Tensor:
    """Images of one of two flat colours."""
    return COLOURS[torch.arange(n) % 2][:, :, None, None].expand(-1, -1, 32, 32).contiguous()


def tiny(folder: Path, **changed: Any) -> Generator:
    images = changed.pop("images", flat())
    settings = {"steps": STEPS, "batch": 4, "width": 2, "seed": 3, "checkpoint_every": 2, "log_every": 1}
    return train_generator(images, folder, **{**settings, **changed})


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "generator.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that is never stopped."""
    folder = tmp_path_factory.mktemp("generator") / "whole"
    tiny(folder)
    return folder


# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("latent", "width", "channels"), [(100, 64, 3), (5, 3, 1)])
def test_the_generator_has_the_layers_of_dcgan(latent: int, width: int, channels: int) -> None:
    generator = Generator(latent=latent, width=width, channels=channels)
    kernels = 16 * (latent * 4 * width + 4 * width * 2 * width + 2 * width * width + width * channels)
    assert sum(weight.numel() for weight in generator.parameters()) == kernels + 2 * 7 * width + channels
    images = generator(10 * torch.randn(2, latent))
    assert images.shape == (2, channels, 32, 32)
    assert images.abs().max() <= 1


@pytest.mark.parametrize(("width", "channels"), [(64, 3), (3, 1)])
def test_the_discriminator_gives_one_logit_an_image(width: int, channels: int) -> None:
    discriminator = Discriminator(width=width, channels=channels)
    kernels = 16 * (channels * width + width * 2 * width + 2 * width * 4 * width + 4 * width)
    assert sum(weight.numel() for weight in discriminator.parameters()) == kernels + width + 1 + 2 * 6 * width
    assert discriminator(torch.zeros(5, channels, 32, 32)).shape == (5,)


@pytest.mark.parametrize("model", [Generator(width=32), Discriminator(width=32)])
def test_weights_begin_with_a_deviation_of_a_fiftieth(model: nn.Module) -> None:
    kernels = torch.cat([weight.detach().flatten() for weight in model.parameters() if weight.ndim == 4])
    assert abs(float(kernels.mean())) < 0.001
    assert float(kernels.std()) == pytest.approx(0.02, rel=0.02)
    factors = torch.cat([m.weight.detach() for m in model.modules() if isinstance(m, nn.BatchNorm2d)])
    assert float(factors.mean()) == pytest.approx(1, abs=0.01)
    assert all(not bias.any() for name, bias in model.named_parameters() if name.endswith("bias"))


# ── samples ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sample_is_decided_by_its_seed_and_begins_like_a_larger_one() -> None:
    generator = Generator(width=2).train()
    one, same, other, larger = (
        sample_images(generator, n, (100,), seed) for n, seed in ((9, 1), (9, 1), (9, 2), (300, 1))
    )
    assert one.dtype == torch.uint8
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(larger[:9], one)
    assert not torch.equal(larger[256:265], one)
    assert generator.training
    assert not generator.layers[1].running_mean.any()  # eval mode: no statistic has moved


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
        ([1], "a tensor of images"),
    ],
)
def test_an_answer_that_is_no_images_is_refused(answer: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sample_images(lambda latents: answer, 2, (4,), 0)


# ── training ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_training_leaves_a_complete_folder(reference: Path) -> None:
    names = {path.name for path in reference.iterdir() if not path.name.startswith(".")}
    weights = {"generator.safetensors", "generator.sha256"}
    assert names == {"generator.toml", "checkpoints", "losses.jsonl", "samples.png", *weights}
    kept = sorted(path.name for path in (reference / "checkpoints").glob("*.safetensors"))
    assert kept == ["step-0000006.safetensors", "step-0000007.safetensors"]
    assert [record["step"] for record in read_json_lines(reference / "losses.jsonl")] == [*range(1, STEPS + 1)]
    picture = imread(reference / "samples.png")
    assert picture.shape[:2] == (8 * 33 * 3, 8 * 33 * 3)


def test_what_is_loaded_is_what_was_trained(reference: Path, tmp_path: Path) -> None:
    made, latent = load_generator(reference)
    assert latent == (100,)
    assert torch.equal(sample_images(made, 4, latent, 0), sample_images(tiny(tmp_path / "again"), 4, latent, 0))


def test_real_images_are_mirrored_half_of_the_time_and_reach_from_minus_one_to_one(reference: Path) -> None:
    settings = GeneratorFolder(reference).settings()
    image = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    image[:, :, :, :7] = 255
    straight = torch.where(image == 255, 1.0, -1.0)[0]
    batches = torch.cat([training._batch(image, settings, step, CPU) for step in range(50)])
    as_they_are, mirrored = (sum(torch.equal(one, made) for made in batches) for one in (straight, straight.flip(2)))
    assert as_they_are + mirrored == len(batches) == 200
    assert 70 < mirrored < 130


def test_every_step_has_images_and_latents_of_its_own(reference: Path) -> None:
    settings = GeneratorFolder(reference).settings()
    images = torch.arange(200, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 32, 32)
    for draw in (
        lambda step: training._batch(images, settings, step, CPU),
        lambda step: training._latents(settings, step),
    ):
        assert torch.equal(draw(1), draw(1))
        assert len({tuple(draw(step).flatten().tolist()) for step in range(5)}) == 5


class Killed(Exception):
    """Stands for a process that ends at this very place."""


@pytest.mark.parametrize("at", range(1, STEPS + 1))
def test_a_training_stopped_after_any_step_ends_with_the_same_bytes(at: int, reference: Path, tmp_path: Path) -> None:
    def stop(step: int, generator: float, discriminator: float) -> None:
        if step == at:
            raise Killed

    with pytest.raises(Killed):
        tiny(tmp_path / "run", progress=stop)
    assert not (tmp_path / "run" / "generator.safetensors").exists()
    steps: list[int] = []
    tiny(tmp_path / "run", progress=lambda step, *losses: steps.append(step), checkpoint_every=3)
    assert steps == [*range(at // 2 * 2 + 1, STEPS + 1)] if at < STEPS else steps == []
    for name in ("generator.safetensors", "losses.jsonl", "samples.png"):
        assert (tmp_path / "run" / name).read_bytes() == (reference / name).read_bytes()


def test_another_seed_gives_other_bytes(reference: Path, tmp_path: Path) -> None:
    tiny(tmp_path / "run", seed=4)
    assert digest(tmp_path / "run") != digest(reference)


def test_a_finished_training_is_not_done_again(reference: Path) -> None:
    def never(step: int, generator: float, discriminator: float) -> None:
        raise AssertionError(step)

    before = (reference / "generator.safetensors").stat().st_mtime_ns
    tiny(reference, progress=never)
    assert (reference / "generator.safetensors").stat().st_mtime_ns == before


def unfinished(folder: Path) -> None:
    """Leave the folder as a kill before the final weights would."""
    tiny(folder)
    for name in ("generator.safetensors", "generator.sha256"):
        (folder / name).unlink()


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_damaged_checkpoint_is_said_and_an_earlier_one_used(damaged: int, reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    unfinished(folder)
    newest = sorted((folder / "checkpoints").glob("*.safetensors"), reverse=True)[:damaged]
    for path in newest:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1  # one bit of a weight
        path.write_bytes(bytes(content))
    complaints: list[str] = []
    steps: list[int] = []
    tiny(folder, progress=lambda step, *losses: steps.append(step), complain=complaints.append)
    reason = "is damaged (its checksum does not match); going back to an earlier step"
    assert complaints == [f"{path.name} {reason}" for path in newest]
    assert steps == ([7] if damaged == 1 else [*range(1, STEPS + 1)])
    assert digest(folder) == digest(reference)


def test_damaged_final_weights_are_refused_and_made_again(reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tiny(folder)
    path = folder / "generator.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(GeneratorError, match=r"generator.safetensors is damaged \(its checksum does not match\)"):
        load_generator(folder)
    complaints: list[str] = []
    tiny(folder, complain=complaints.append)
    assert complaints == [f"{path} is damaged (its checksum does not match); it is made again"]
    assert digest(folder) == digest(reference)


def test_other_settings_are_refused_and_named(reference: Path) -> None:
    words = r"was started with other settings: steps: 7 -> 5; width: 2 -> 3$"
    with pytest.raises(GeneratorError, match=words):
        tiny(reference, steps=5, width=3)
    with pytest.raises(GeneratorError, match=r"other settings: images: '40 × 3 × 32 × 32, SHA-256 \w+' -> '40 × 3"):
        tiny(reference, images=flat().flip(0))


def test_a_finished_training_can_be_given_more_steps(reference: Path, tmp_path: Path) -> None:
    tiny(tmp_path / "more", steps=4)
    tiny(tmp_path / "more", steps=7)
    assert digest(tmp_path / "more") == digest(reference)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(GeneratorError, match="holds other files than a generator's; name a new folder"):
        tiny(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    def second(step: int, generator: float, discriminator: float) -> None:
        tiny(tmp_path / "run")

    with pytest.raises(GeneratorError, match="another process is training in"):
        tiny(tmp_path / "run", progress=second)


@pytest.mark.parametrize("images", [flat().float(), flat()[:, :, :16], flat()[:0], flat()[0]])
def test_images_of_another_kind_are_refused(images: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a generator learns from N × C × 32 × 32 bytes, got torch"):
        tiny(tmp_path / "run", images=images)
    assert not (tmp_path / "run").exists()


def test_a_training_that_diverges_says_so(tmp_path: Path) -> None:
    with pytest.raises(GeneratorError, match=r"the training diverged at step .*; start a new folder with rate below"):
        tiny(tmp_path / "run", rate=1e38)


def test_the_generator_learns_the_colours_of_its_images(tmp_path: Path) -> None:
    def distance(generator: Generator) -> float:
        means = sample_images(generator, 64, (100,), 0).float().mean(dim=(2, 3))
        return float(torch.cdist(means, COLOURS.float()).min(dim=1).values.mean())

    untrained = distance(train_generator(flat(), tmp_path / "untrained", steps=1, width=8, batch=16, rate=4e-3))
    trained = distance(train_generator(flat(), tmp_path / "trained", steps=200, width=8, batch=16, rate=4e-3))
    assert trained < untrained / 2


# ── exported programs ───────────────────────────────────────────────────────────────────────────────────────────────


class Tiny(nn.Module):
    """Latents 2 × 3 to images 1 × 2 × 3."""

    def forward(self, latents: Tensor) -> Tensor:
        return torch.tanh(latents).unsqueeze(1)


@pytest.mark.parametrize(
    ("size", "dynamic"),
    [(4, None), (100, None), (4, {0: torch.export.Dim.DYNAMIC}), (4, {0: torch.export.Dim("batch", max=60)})],
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
    with pytest.raises(GeneratorError, match="must take one argument, a batch of latents"):
        load_generator(tmp_path / "sum.pt2", trust=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken.pt2", "broken.pt2 is not a program written by torch.export.save: "),
        ("missing.pt2", "there is no file "),
        ("missing", "missing is not a generator: it has no generator.toml"),
        ("unfinished", "unfinished holds no trained generator yet: it has no generator.safetensors"),
        ("odd", "width = 'wide': must be a whole number of at least 1"),
    ],
)
def test_what_is_no_generator_is_refused_in_one_line(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "broken.pt2").write_bytes(b"nothing")
    unfinished(tmp_path / "unfinished")
    (tmp_path / "odd").mkdir()
    text = (tmp_path / "unfinished" / "generator.toml").read_text()
    (tmp_path / "odd" / "generator.toml").write_text(text.replace("width = 2", "width = 'wide'"))
    with pytest.raises(GeneratorError, match=words) as raised:
        load_generator(tmp_path / name, trust=True)
    assert "\n" not in str(raised.value)


# ── pictures ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_images_of_any_kind_are_read_in_colour_and_small(tmp_path: Path) -> None:
    (tmp_path / "images" / "class").mkdir(parents=True)
    imsave(tmp_path / "images" / "class" / "red.png", np.full((90, 50, 3), (255, 0, 0), dtype=np.uint8))
    from PIL import Image

    Image.new("L", (10, 20), 77).save(tmp_path / "images" / "grey.bmp")
    (tmp_path / "images" / "notes.txt").write_text("not an image")
    images = read_images(tmp_path / "images")
    assert images.shape == (2, 3, 32, 32)
    assert images.float().mean(dim=(2, 3)).tolist() == [[255, 0, 0], [77, 77, 77]]


def test_a_picture_keeps_every_byte() -> None:
    image = torch.randint(0, 256, (3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    read = imread(io.BytesIO(png(image)), format="png")
    assert (read[..., :3] * 255).round().astype(np.uint8).tolist() == image.permute(1, 2, 0).tolist()


def test_a_sheet_has_its_images_row_by_row() -> None:
    images = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1).expand(-1, 1, 2, 2)
    assert sheet(images, columns=3, zoom=1)[0, ::3, ::3].tolist() == [[0, 1, 2], [3, 4, 255]]
    assert sheet(images, columns=3, zoom=2).shape == (1, 12, 18)


# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images, and a generator trained on them."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "images").mkdir()
    for index, image in enumerate(flat(4)):
        (folder / "images" / f"{index}.png").write_bytes(png(image))
    done = feddf(*TRAIN, "--out", "out", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "out: step 6/6 saved, losses: generator" in done.stdout
    assert "generator: out; what it makes: out/samples.png" in done.stdout
    return folder


TRAIN = ["generator", "train", "images", "steps=6", "batch=4", "width=2", "every=2"]


def test_a_data_set_can_be_named_instead_of_a_folder(tmp_path: Path) -> None:
    done = feddf("generator", "train", "digits", *TRAIN[3:], "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert GeneratorFolder(tmp_path / "out").settings().images.startswith("1438 × 3 × 32 × 32, ")


def test_samples_are_written_by_suffix(place: Path) -> None:
    for out in ("s.npz", "s.png", "s"):
        done = feddf("generator", "sample", "out", "n=5", "seed=1", "--out", out, cwd=place)
        assert (done.returncode, done.stdout) == (0, f"5 images: {out}\n"), done.stderr
    images = np.load(place / "s.npz")["images"]
    assert images.shape == (5, 3, 32, 32)
    made, latent = load_generator(place / "out")
    assert torch.equal(torch.from_numpy(images), sample_images(made, 5, latent, 1))
    assert torch.equal(read_images(place / "s"), torch.from_numpy(images))
    assert imread(place / "s.png").shape[:2] == (3 * 99, 2 * 99)


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["train", "nowhere", "--out", "x"], 2, "IMAGES = 'nowhere': is neither a folder nor a data set; known are: "),
        (["train", "toy", "--out", "x"], 2, "IMAGES = 'toy': inputs of type torch.float32 cannot stand in for"),
        (["train", "cifar10", "folder=here", "--out", "x"], 2, "data 'cifar10' is not complete in here: no file"),
        (["train", "empty", "--out", "x"], 2, "IMAGES = 'empty': empty holds no images; known are files that end in"),
        (["train", "bad", "--out", "x"], 2, "IMAGES = 'bad': bad/b.png cannot be read as an image: "),
        (["train", "images", "batch=1", "--out", "x"], 2, "batch = '1': must be whole numbers of at least 2"),
        (["train", "images", "rate=0", "--out", "x"], 2, "rate = '0': must be a number above 0, for instance 0.0002"),
        (["train", "images", "stesp=3", "--out", "x"], 2, "unknown word 'stesp=3'; known are: steps=, batch=, "),
        (["train", "images", "--out", "images"], 1, "images holds other files than a generator's; name a new folder"),
        ([*TRAIN[1:], "width=4", "--out", "out"], 1, "out was started with other settings: width: 2 -> 4"),
        (["sample", "images", "--out", "x.npz"], 1, "images is not a generator: it has no generator.toml; name a"),
        (["sample", "out", "--out", "x.jpg"], 2, "--out = 'x.jpg': must end in .npz or .png, or be a folder without"),
        (["sample", "out", "--out", "images"], 2, "--out = 'images': is there already and not an empty folder"),
        (["sample", "out", "n=0", "--out", "x.npz"], 2, "n = '0': must be whole numbers of at least 1"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(words: list[str], code: int, line: str, place: Path) -> None:
    (place / "empty").mkdir(exist_ok=True)
    (place / "bad").mkdir(exist_ok=True)
    (place / "bad" / "b.png").write_bytes(b"no picture")
    before = {path.name for path in place.iterdir()}
    done = feddf("generator", *words, cwd=place)
    assert done.stderr.startswith(f"error: {line}")
    assert done.stderr.count("\n") == 1
    assert (done.returncode, done.stdout) == (code, "")
    assert {path.name for path in place.iterdir()} == before


def test_without_pillow_the_remedy_is_said(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    done = feddf(*TRAIN, "--out", "y", cwd=place)
    remedy = "reading image files needs Pillow: pip install 'feddf[images]'"
    assert (done.returncode, done.stderr) == (2, f"error: IMAGES = 'images': {remedy}\n")


def test_control_c_says_how_to_go_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = training._step

    def interrupted(players: Any, images: Tensor, settings: Any, step: int, *rest: Any) -> Any:
        if step == 4:
            raise KeyboardInterrupt
        return original(players, images, settings, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(training, "_step", interrupted)
        stopped = feddf(*TRAIN, "--out", "z", cwd=place)
    again = "feddf generator train images steps=6 batch=4 width=2 every=2 --out z"
    assert stopped.returncode == 130
    assert stopped.stderr == f"stopped; saved steps are safe. Continue with: {again}\n"
    resumed = feddf(*TRAIN, "--out", "z", cwd=place)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.startswith("z: going on after step 2\n")
    assert digest(place / "z") == digest(place / "out")


KILLED = """
import os, pathlib, signal, sys
import feddf.cli
original, calls = pathlib.Path.replace, 0
def replace(self, target):
    global calls
    calls += 1
    if calls == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, target)
pathlib.Path.replace = replace
feddf.cli.main()
"""


def test_a_process_killed_while_it_saves_is_gone_on_with_by_the_same_command(place: Path) -> None:
    """Settings, then picture, checksum and checkpoint of step 2, then of step 4: its checkpoint is never renamed."""
    command = [sys.executable, "-c", KILLED, *TRAIN, "--out", "k"]
    killed = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = {path.name for path in (place / "k" / "checkpoints").iterdir()}
    assert {"step-0000002.safetensors", "step-0000004.sha256"} < left
    assert "step-0000004.safetensors" not in left
    done = feddf(*TRAIN, "--out", "k", cwd=place)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("k: going on after step 2\n")
    for name in ("generator.safetensors", "losses.jsonl", "samples.png"):
        assert (place / "k" / name).read_bytes() == (place / "out" / name).read_bytes()
