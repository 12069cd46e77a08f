"""Train a small DCGAN in plain torch, and write it as a generator of unlabeled images for FedDF's pool.

    pip install 'feddf[demo]' && python examples/train_generator.py --out generator.pt2
    feddf run demo pool.sources=generator:generator.pt2 --trust

Here it learns from scikit-learn's digits; replace ``load_images`` by images of your own. Any network from latents to
images in [−1, 1] can be exported in the same way. (Goodfellow et al. 2014; Radford et al. 2016, for 32×32 pixels.)
"""

from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LATENT, SIDE = 100, 32


def load_images() -> Tensor:
    """Return the images to learn from, N × C × 32 × 32 in [−1, 1]."""
    from sklearn.datasets import load_digits

    digits = torch.from_numpy(load_digits().images).float()[:, None] / 8 - 1  # from 0 to 16
    return F.interpolate(F.pad(digits, (1, 1, 1, 1), value=-1), size=SIDE, mode="bilinear")


class Generator(nn.Module):
    """Latents from N(0, 1), N × 100, to images in [−1, 1], N × ``channels`` × 32 × 32."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(LATENT, 4 * width, 4, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, channels, 4, 2, padding=1),
            nn.Tanh(),
        )

    def forward(self, latents: Tensor) -> Tensor:
        return self.layers(latents[:, :, None, None])


def make_discriminator(width: int, channels: int) -> nn.Sequential:
    """Images to N logits of being real: the generator's mirror image, without BatchNorm in its first layer."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 4, 2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, 2, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 4 * width, 4, 2, padding=1, bias=False),
        nn.BatchNorm2d(4 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(4 * width, 1, 4),
        nn.Flatten(0),
    )


def initialize(module: nn.Module) -> None:
    """Draw kernels from N(0, 0.02²), as the paper says, and BatchNorm's factors from N(1, 0.02²)."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0 if isinstance(module, nn.BatchNorm2d) else 0.0, 0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def train(images: Tensor, steps: int, batch_size: int, lr: float, width: int, device: str) -> Generator:
    """Return a generator after ``steps`` batches.

    The discriminator D goes down −log D(x) − log(1 − D(G(z))), then the generator G goes down −log D(G(z)), the loss
    that does not saturate. D is the sigmoid of a logit a, and −log sigmoid(a) = softplus(−a).
    """
    channels = images.shape[1]
    generator = Generator(width, channels).apply(initialize).to(device)
    discriminator = make_discriminator(width, channels).apply(initialize).to(device)
    adams = [torch.optim.Adam(player.parameters(), lr=lr, betas=(0.5, 0.999)) for player in (generator, discriminator)]
    for step in range(1, steps + 1):
        real = images[torch.randint(len(images), (batch_size,))].to(device)
        made = generator(torch.randn(batch_size, LATENT).to(device))
        told_apart = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(made.detach())).mean()
        descend(adams[1], told_apart)
        fooled = F.softplus(-discriminator(made)).mean()
        descend(adams[0], fooled)
        if step % 100 == 0 or step == steps:
            print(f"step {step}/{steps}: generator {fooled.item():.3f}, discriminator {told_apart.item():.3f}")
    return generator.to("cpu").eval()


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def export(generator: Generator, path: Path) -> None:
    """Write the network as a program for batches of any size, and 64 of its images beside it."""
    from matplotlib.image import imsave

    latents = torch.randn(64, LATENT)
    any_size = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(generator, (latents,), dynamic_shapes=any_size), path)
    with torch.no_grad():
        rows = (generator(latents) + 1).unflatten(0, (8, 8)).permute(0, 3, 1, 4, 2).reshape(8 * SIDE, 8 * SIDE, -1)
    imsave(path.with_suffix(".png"), (rows.expand(-1, -1, 3) / 2).clamp(0, 1).numpy())


def main() -> None:
    options = ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, default=Path("generator.pt2"), help="the file to write")
    for name, default in (("steps", 3000), ("batch-size", 64), ("width", 32), ("seed", 0)):
        options.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    options.add_argument("--lr", type=float, default=2e-4, help="default: 0.0002")
    options.add_argument("--device", default="cpu", help="as torch names it; default: cpu")
    given = options.parse_args()
    torch.manual_seed(given.seed)
    generator = train(load_images(), given.steps, given.batch_size, given.lr, given.width, given.device)
    export(generator, given.out)
    print(f"written: {given.out} (its images: {given.out.with_suffix('.png')})")


if __name__ == "__main__":
    main()
