"""Train a generator against a discriminator (Goodfellow et al. 2014); the training may be killed at any moment."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddf.generator.folder import GeneratorError, GeneratorFolder, GeneratorSettings, fingerprint
from feddf.generator.pictures import png, sheet
from feddf.generator.sampling import sample_images
from feddf.models.dcgan import SIDE, Discriminator, Generator
from feddf.runtime import threads as torch_threads
from feddf.runtime.atomic import write_atomically
from feddf.seeds import derive, seeded, torch_generator
from feddf.states import copy
from feddf.types import State

TrainingProgress = Callable[[int, float, float], None]
"""(steps done, the generator's loss, the discriminator's loss): called after every step."""

LATENT = 100
SHOWN = 64


def no_progress(step: int, generator_loss: float, discriminator_loss: float) -> None:
    """Watch nothing."""


def train_generator(
    images: Tensor,
    folder: Path,
    *,
    steps: int,
    batch: int = 64,
    rate: float = 2e-4,
    width: int = 64,
    seed: int = 0,
    threads: int = 1,
    checkpoint_every: int = 500,
    log_every: int = 50,
    progress: TrainingProgress = no_progress,
    complain: Callable[[str], None] = warnings.warn,
) -> Generator:
    """Train on N × C × 32 × 32 bytes, or go on where the folder's training of the same settings was stopped.

    Only ``steps`` may have grown: a finished training goes on to the new number.

    Every batch, mirroring and latent follows from the seed and the number of the step; so a training that is killed
    at any moment and called again ends with the same bytes as one that was never killed. ``checkpoint_every`` changes
    none of them. The number of torch threads does (a sum that is split rounds differently) and is therefore a setting.
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or tuple(images.shape[2:]) != (SIDE, SIDE) or not len(images):
        given = f"{images.dtype} of shape {tuple(images.shape)}"
        raise ValueError(f"a generator learns from N × C × {SIDE} × {SIDE} bytes, got {given}")
    if min(checkpoint_every, log_every) < 1:
        raise ValueError(f"checkpoint_every and log_every must be at least 1, got {checkpoint_every}, {log_every}")
    channels = images.shape[1]
    settings = GeneratorSettings(fingerprint(images), steps, batch, rate, LATENT, width, channels, seed, threads)
    place = GeneratorFolder.prepare(folder, settings)
    with place.locked(), torch_threads.threads(threads):
        place.extend(settings)
        if place.weights.exists():
            try:
                return place.generator()
            except GeneratorError as error:
                complain(f"{error}; it is made again")
        players, done = _resumed(settings, place, complain)
        for step in range(done + 1, steps + 1):
            generator_loss, discriminator_loss = _step(players, images, settings, step)
            if not isfinite(generator_loss + discriminator_loss):
                raise GeneratorError(f"the training diverged at step {step}; start a new folder with rate below {rate}")
            if step % log_every == 0 or step == steps:
                place.append({"step": step, "generator": generator_loss, "discriminator": discriminator_loss})
            if step % checkpoint_every == 0 or step == steps:
                _draw(players.generator, settings, place.path / "samples.png")  # before: no step is drawn after a kill
                place.save(step, players.tensors())
            progress(step, generator_loss, discriminator_loss)
        place.finish(copy(players.generator.state_dict()))
        return players.generator.eval()


@dataclass(frozen=True)
class _Players:
    """Both players and their optimizers: all that a step changes."""

    generator: Generator
    discriminator: Discriminator
    generator_adam: torch.optim.Adam
    discriminator_adam: torch.optim.Adam

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor, under a name that tells whose it is."""
        found: dict[str, Tensor] = {}
        for name, model, adam in self._each():
            found |= {f"{name} {key}": tensor for key, tensor in model.state_dict().items()}
            for index, moments in adam.state_dict()["state"].items():
                found |= {f"{name} adam {index} {key}": tensor for key, tensor in moments.items()}
        return copy(found)

    def restore(self, tensors: State) -> None:
        """Take the values of :meth:`tensors` back."""
        for name, model, adam in self._each():
            model.load_state_dict({key: tensors[f"{name} {key}"] for key in model.state_dict()})
            moments: dict[int, dict[str, Tensor]] = {}
            for key, tensor in tensors.items():
                owner, _, rest = key.partition(" adam ")
                if owner == name and rest:
                    index, _, moment = rest.partition(" ")
                    moments.setdefault(int(index), {})[moment] = tensor
            adam.load_state_dict({**adam.state_dict(), "state": moments})

    def _each(self) -> tuple[tuple[str, nn.Module, torch.optim.Adam], ...]:
        return (
            ("generator", self.generator, self.generator_adam),
            ("discriminator", self.discriminator, self.discriminator_adam),
        )


def _new_players(settings: GeneratorSettings) -> _Players:
    with seeded(derive(settings.seed, "init", "generator")):
        generator = settings.build().train()
        discriminator = Discriminator(width=settings.width, channels=settings.channels).train()

    def adam(model: nn.Module) -> torch.optim.Adam:
        return torch.optim.Adam(model.parameters(), lr=settings.rate, betas=(0.5, 0.999))

    return _Players(generator, discriminator, adam(generator), adam(discriminator))


def _resumed(
    settings: GeneratorSettings, place: GeneratorFolder, complain: Callable[[str], None]
) -> tuple[_Players, int]:
    """Return the players of the newest whole checkpoint and the steps done, or new ones."""
    players = _new_players(settings)
    done, tensors, complaints = place.latest()
    if tensors is not None:
        players.restore(tensors)
        if changed := place.changed_versions():
            complaints.append(f"bytes may differ: {', '.join(changed)}")
    for complaint in complaints:
        complain(complaint)
    place.forget_after(done)
    return players, done


def _step(players: _Players, images: Tensor, settings: GeneratorSettings, step: int) -> tuple[float, float]:
    """Let each player learn once from a batch; return the generator's loss and the discriminator's.

    The discriminator goes down −log D(x) − log(1 − D(G(z))), then the generator −log D(G(z)): the loss that does not
    saturate (Goodfellow et al. 2014, section 3). D is the sigmoid of a logit, and −log sigmoid(a) = softplus(−a).
    """
    real = _batch(images, settings, step)
    made = players.generator(_latents(settings, step))

    told_apart = (
        F.softplus(-players.discriminator(real)).mean() + F.softplus(players.discriminator(made.detach())).mean()
    )
    players.discriminator_adam.zero_grad()
    told_apart.backward()
    players.discriminator_adam.step()

    fooled = F.softplus(-players.discriminator(made)).mean()
    players.generator_adam.zero_grad()
    fooled.backward()
    players.generator_adam.step()
    return float(fooled.detach()), float(told_apart.detach())


def _batch(images: Tensor, settings: GeneratorSettings, step: int) -> Tensor:
    """Return images chosen at random, each mirrored with probability ½, in [−1, 1]."""
    random = torch_generator(derive(settings.seed, "batch", step))
    chosen = images[torch.randint(len(images), (settings.batch,), generator=random)]
    mirrored = torch.randint(0, 2, (settings.batch, 1, 1, 1), generator=random, dtype=torch.bool)
    return torch.where(mirrored, chosen.flip(3), chosen).to(torch.float32) / 127.5 - 1


def _latents(settings: GeneratorSettings, step: int) -> Tensor:
    random = torch_generator(derive(settings.seed, "latents", step))
    return torch.randn((settings.batch, settings.latent), generator=random)


def _draw(generator: Generator, settings: GeneratorSettings, path: Path) -> None:
    if settings.channels in (1, 3):  # others are no picture
        images = sample_images(generator, SHOWN, (settings.latent,), derive(settings.seed, "samples"))
        write_atomically(path, png(sheet(images)))
