"""A source of unlabeled images that needs no images at hand: a frozen generator, trained here or brought along.

The paper distils on the images of a BigGAN that somebody else has trained; this one is small enough to be trained on
a laptop, on any unlabeled images.
"""

from __future__ import annotations

from feddf.generator.generator_folder import GeneratorError
from feddf.generator.sampling import Make, load_generator, sample_images
from feddf.generator.training import train_generator

__all__ = ["GeneratorError", "Make", "load_generator", "sample_images", "train_generator"]
