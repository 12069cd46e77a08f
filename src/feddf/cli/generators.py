"""``feddf generator train`` and ``feddf generator sample``."""

from __future__ import annotations

import io
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from feddf.cli.arguments import App, Trust, complain, err_console, number, out_console, split_words
from feddf.config.errors import ConfigError, FeddfError, first_line
from feddf.config.names import DATASETS
from feddf.runtime.atomic import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

generator_app = App(help="Train a generator of unlabeled images, and look at what it makes.", no_args_is_help=True)

TRAIN = {"steps": "20000", "batch": "64", "rate": "0.0002", "width": "64", "seed": "0", "threads": "1"}
FREE = {"every": "500", "folder": "", "device": "auto"}
"""Words that may change when a training goes on. They change none of its bytes, or in case of the device the last bits:
then there is a warning."""


@generator_app.command()
def train(
    images: Annotated[
        str,
        typer.Argument(metavar="IMAGES", help="A folder of images, or a data set's name.", show_default=False),
    ],
    out: Annotated[
        Path, typer.Option(help="The generator's folder; a stopped training there goes on.", show_default=False)
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[steps=20000] [batch=64] [rate=0.0002] [width=64] [seed=0] [threads=1] [every=500] [folder=DIR] "
            "[device=auto]",
            help="How to train, and after how many steps to save.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train a small generator (DCGAN) on unlabeled images; called again, it goes on where it was stopped."""
    own, rest = split_words(words, {**TRAIN, **FREE})
    _refuse(rest, own)
    steps, every = number("steps", own["steps"]), number("every", own["every"])
    whole = {key: number(key, own[key], least) for key, least in (("batch", 2), ("width", 1), ("threads", 1))}
    seed, rate = number("seed", own["seed"], least=0), _rate(own["rate"])
    from feddf.generator import train_generator

    pixels = _images(images, own["folder"])
    try:
        with _one_line(), _shown(out_console, out, steps, every) as progress:
            train_generator(
                pixels,
                out,
                steps=steps,
                rate=rate,
                seed=seed,
                **whole,
                device=own["device"],
                checkpoint_every=every,
                progress=progress,
                complain=_warn,
            )
    except KeyboardInterrupt:
        again = shlex.join(["feddf", "generator", "train", images, *(words or []), "--out", str(out)])
        err_console.print(f"stopped; saved steps are safe. Continue with: {again}", soft_wrap=True, highlight=False)
        raise
    out_console.print(f"generator: {out}; what it makes: {out / 'samples.png'}", soft_wrap=True, highlight=False)


@generator_app.command()
def sample(
    generator: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="A folder of feddf generator train, or a .pt2 file of torch.export.save.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="FILE.npz, FILE.png (all on one sheet), or a folder for a PNG file each.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[n=64] [seed=0]", help="How many images, and which.", show_default=False),
    ] = None,
    trust: Trust = False,
) -> None:
    """Make images with a trained generator."""
    own, rest = split_words(words, {"n": "64", "seed": "0"})
    _refuse(rest, own)
    n, seed = number("n", own["n"]), number("seed", own["seed"], least=0)
    write = _writer(out)
    with _one_line():
        from feddf.generator import load_generator, sample_images

        make, latent = load_generator(generator, trust=trust)
        write(sample_images(make, n, latent, seed))
    out_console.print(f"{n} images: {out}", soft_wrap=True, highlight=False)


@contextmanager
def _one_line() -> Iterator[None]:
    """Let a wrong value end the command with one line."""
    try:
        yield
    except ValueError as error:
        raise FeddfError(first_line(error)) from error


def _warn(complaint: str) -> None:
    complain(complaint)


def _refuse(rest: list[str], own: dict[str, str]) -> None:
    if rest:
        raise ConfigError(f"unknown word '{rest[0]}'; known are: {', '.join(f'{key}=' for key in own)}")


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError.at("rate", text, "must be a number above 0, for instance 0.0002")
    return value


def _images(name: str, folder: str) -> Tensor:
    """Return the images of a data set, without its labels, or of a folder, in colour and 32×32."""
    import torch

    from feddf.config.sections import DataConfig
    from feddf.data.encode import plain
    from feddf.data.unlabeled import adapt, choose
    from feddf.generator import GeneratorError
    from feddf.generator.pictures import read_images
    from feddf.models.dcgan import SIDE
    from feddf.types import Inputs

    wanted = Inputs(torch.zeros((0, 3, SIDE, SIDE), dtype=torch.uint8), plain)
    try:
        if name in DATASETS:
            data = DATASETS[name](DataConfig(name=name, folder=folder or None))
            source = choose((data.unlabeled or data.train.inputs).raw, None, 0)
            return choose(adapt(source, wanted).raw, None, 0)
        if Path(name).is_dir():
            return read_images(Path(name))
    except (GeneratorError, ValueError) as error:
        raise ConfigError(f"IMAGES = '{name}': {error}") from error
    raise ConfigError.at("IMAGES", name, f"is neither a folder nor a data set; known are: {', '.join(DATASETS)}")


@contextmanager
def _shown(console: Console, out: Path, steps: int, every: int) -> Iterator[Callable[[int, float, float], None]]:
    """Give a function that shows the progress: a bar on a terminal, a line for each checkpoint elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    first = True

    def say(text: str) -> None:
        console.print(f"{out}: {text}", soft_wrap=True, highlight=False)

    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=steps)

        def update(step: int, generator: float, discriminator: float) -> None:
            nonlocal first
            losses = f"losses: generator {generator:.3f}, discriminator {discriminator:.3f}"
            if first and step > 1:
                say(f"going on after step {step - 1}")
            if not console.is_terminal and (step % every == 0 or step == steps):
                say(f"step {step}/{steps} saved, {losses}")
            bar.update(task, completed=step, description=losses)
            first = False

        yield update


def _writer(out: Path) -> Callable[[Tensor], None]:
    """Return what writes images to ``out``, by its suffix; a mistake is said before any image is made."""
    kinds: dict[str, Callable[[Path, Tensor], None]] = {".npz": _write_arrays, ".png": _write_sheet, "": _write_files}
    if out.suffix not in kinds:
        raise ConfigError.at("--out", str(out), "must end in .npz or .png, or be a folder without a suffix")
    if out.suffix == "" and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError.at("--out", str(out), "is there already and not an empty folder; name a new one")
    return lambda images: kinds[out.suffix](out, images)


def _write_arrays(out: Path, images: Tensor) -> None:
    import numpy as np

    content = io.BytesIO()
    np.savez_compressed(content, images=images.numpy())
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, content.getvalue())


def _write_sheet(out: Path, images: Tensor) -> None:
    from feddf.generator.pictures import png, sheet

    content = png(sheet(images, columns=max(1, round(len(images) ** 0.5))))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, content)


def _write_files(out: Path, images: Tensor) -> None:
    from feddf.generator.pictures import png

    out.mkdir(parents=True, exist_ok=True)
    for index, image in enumerate(images):
        write_atomically(out / f"{index:06d}.png", png(image))
