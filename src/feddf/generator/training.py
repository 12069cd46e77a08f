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

from feddf.batches import batches
from feddf.generator.generator_folder import GeneratorError, GeneratorFolder, GeneratorSettings, fingerprint
from feddf.generator.pictures import png, sheet
from feddf.generator.sampling import sample_images
from feddf.models.dcgan import SIDE, Discriminator, Generator
from feddf.runtime import threads as torch_threads
from feddf.runtime.atomic import write_atomically
from feddf.runtime.device import CPU, moved
from feddf.runtime.execution import Execution
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
    device: str = "cpu",
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

    ``device`` is where both players are, ``auto`` or a name as torch has it; batches and latents are drawn on the CPU,
    so that they are the same everywhere. On an accelerator ``progress`` is told of every step that is logged or saved,
    and of no other: for each it has to wait.
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or tuple(images.shape[2:]) != (SIDE, SIDE) or not len(images):
        given = f"{images.dtype} of shape {tuple(images.shape)}"
        raise ValueError(f"a generator learns from N × C × {SIDE} × {SIDE} bytes, got {given}")
    if min(checkpoint_every, log_every) < 1:
        raise ValueError(f"checkpoint_every and log_every must be at least 1, got {checkpoint_every}, {log_every}")
    channels, every = images.shape[1], _Every(checkpoint_every, log_every)
    settings = GeneratorSettings(fingerprint(images), steps, batch, rate, LATENT, width, channels, seed, threads)
    execution = Execution(device=device)
    with execution.begun() as on, torch_threads.threads(threads):
        return _trained(images, GeneratorFolder.prepare(folder, settings, on), settings, on, every, progress, complain)


@dataclass(frozen=True)
class _Every:
    """After how many steps something is done."""

    checkpoint: int
    log: int

    def reads(self, step: int, steps: int, device: torch.device) -> bool:
        """Say whether the losses of a step are looked at."""
        return device.type == "cpu" or step % self.checkpoint == 0 or step % self.log == 0 or step == steps


def _trained(
    images: Tensor,
    place: GeneratorFolder,
    settings: GeneratorSettings,
    device: torch.device,
    every: _Every,
    progress: TrainingProgress,
    complain: Callable[[str], None],
) -> Generator:
    steps, rate = settings.steps, settings.rate
    with place.locked():
        place.extend(settings)
        if place.weights.exists():
            try:
                return place.generator()
            except GeneratorError as error:
                complain(f"{error}; it is made again")
        players, done = _resumed(settings, place, device, complain)
        for step in range(done + 1, steps + 1):
            losses = _step(players, images, settings, step, device)
            if not every.reads(step, steps, device):
                continue
            generator_loss, discriminator_loss = torch.stack(losses).to(CPU).tolist()
            if not isfinite(generator_loss + discriminator_loss):
                raise GeneratorError(f"the training diverged at step {step}; start a new folder with rate below {rate}")
            if step % every.log == 0 or step == steps:
                place.append({"step": step, "generator": generator_loss, "discriminator": discriminator_loss})
            if step % every.checkpoint == 0 or step == steps:
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


def _new_players(settings: GeneratorSettings, device: torch.device) -> _Players:
    with seeded(derive(settings.seed, "init", "generator")):
        generator = settings.build().train()
        discriminator = Discriminator(width=settings.width, channels=settings.channels).train()
    generator, discriminator = generator.to(device), discriminator.to(device)

    def adam(model: nn.Module) -> torch.optim.Adam:
        return torch.optim.Adam(model.parameters(), lr=settings.rate, betas=(0.5, 0.999))

    return _Players(generator, discriminator, adam(generator), adam(discriminator))


def _resumed(
    settings: GeneratorSettings, place: GeneratorFolder, device: torch.device, complain: Callable[[str], None]
) -> tuple[_Players, int]:
    """Return the players of the newest whole checkpoint and the steps done, or new ones."""
    players = _new_players(settings, device)
    done, tensors, complaints = place.latest()
    if tensors is not None:
        players.restore(tensors)
        if changed := place.changed_versions(device):
            complaints.append(f"bytes may differ: {', '.join(changed)}")
    for complaint in complaints:
        complain(complaint)
    place.forget_after(done)
    return players, done


def _step(
    players: _Players, images: Tensor, settings: GeneratorSettings, step: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Let each player learn once from a batch; return the generator's loss and the discriminator's.

    The discriminator goes down −log D(x) − log(1 − D(G(z))), then the generator −log D(G(z)): the loss that does not
    saturate (Goodfellow et al. 2014, section 3). D is the sigmoid of a logit, and −log sigmoid(a) = softplus(−a).
    """
    real = _batch(images, settings, step, device)
    made = players.generator(moved(_latents(settings, step), device))

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
    return fooled.detach(), told_apart.detach()


def _batch(images: Tensor, settings: GeneratorSettings, step: int, device: torch.device) -> Tensor:
    """Return images chosen at random, each mirrored with probability ½, in [−1, 1]."""
    random = torch_generator(derive(settings.seed, "batch", step))
    indices = torch.randint(len(images), (settings.batch,), generator=random)
    ((_, chosen),) = batches(images, [indices], device)
    mirrored = moved(torch.randint(0, 2, (settings.batch, 1, 1, 1), generator=random, dtype=torch.bool), device)
    return torch.where(mirrored, chosen.flip(3), chosen).to(torch.float32) / 127.5 - 1


def _latents(settings: GeneratorSettings, step: int) -> Tensor:
    random = torch_generator(derive(settings.seed, "latents", step))
    return torch.randn((settings.batch, settings.latent), generator=random)


def _draw(generator: Generator, settings: GeneratorSettings, path: Path) -> None:
    if settings.channels in (1, 3):  # others are no picture
        images = sample_images(generator, SHOWN, (settings.latent,), derive(settings.seed, "samples"))
        write_atomically(path, png(sheet(images)))
