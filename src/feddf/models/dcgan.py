"""A generator of 32×32 images and its discriminator, after DCGAN (Radford et al. 2016), one layer less than for 64×64.

Every layer but the first doubles (or halves) the side of its image with a 4×4 kernel: 4 → 8 → 16 → 32.
"""

from __future__ import annotations

from torch import Tensor, nn

SIDE = 32
"""The side of an image that is made or seen here."""


class Generator(nn.Module):
    """G: latents from N(0, 1), N × ``latent``, to images in [−1, 1], N × ``channels`` × 32 × 32.

    Transposed convolutions with BatchNorm and ReLU of 4, 2 and 1 times ``width`` channels; the last one ends in tanh.
    """

    def __init__(self, *, latent: int = 100, width: int = 64, channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.ConvTranspose2d(latent, 4 * width, 4, bias=False)]
        for given, out in ((4 * width, 2 * width), (2 * width, width)):
            layers += [nn.BatchNorm2d(given), nn.ReLU(), nn.ConvTranspose2d(given, out, 4, 2, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.ConvTranspose2d(width, channels, 4, 2, padding=1), nn.Tanh()]
        self.layers = nn.Sequential(*layers)
        _initialise(self)

    def forward(self, latents: Tensor) -> Tensor:
        """Return the images."""
        images: Tensor = self.layers(latents[:, :, None, None])
        return images


class Discriminator(nn.Module):
    """D: images, N × ``channels`` × 32 × 32, to N logits of being real.

    The generator's mirror image, with LeakyReLU of slope 0.2 and without BatchNorm in its first layer.
    """

    def __init__(self, *, width: int = 64, channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 4, 2, padding=1), nn.LeakyReLU(0.2)]
        for given, out in ((width, 2 * width), (2 * width, 4 * width)):
            layers += [nn.Conv2d(given, out, 4, 2, padding=1, bias=False), nn.BatchNorm2d(out), nn.LeakyReLU(0.2)]
        layers.append(nn.Conv2d(4 * width, 1, 4))
        self.layers = nn.Sequential(*layers)
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.layers(images)
        return logits.flatten()


def _initialise(model: nn.Module) -> None:
    """Draw kernels from N(0, 0.02²), as the paper says, and BatchNorm's factors from N(1, 0.02²); the rest is zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0 if isinstance(module, nn.BatchNorm2d) else 0.0, 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
