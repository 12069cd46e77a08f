"""The order of a convolution's weights in memory: channels last, where that is safe."""

from __future__ import annotations

import torch
from torch import nn

SAFE_CHANNELS = 8
"""The least input channels of a strided 1×1 convolution whose gradient may be computed with channels last.

torch 2.13 on a CPU whose widest vectors have 256 bits (AVX2) writes beyond the gradient of the weights if there are
fewer, and corrupts the heap::

    x = torch.randn(3, 4, 14, 14).contiguous(memory_format=torch.channels_last)
    w = torch.randn(8, 4, 1, 1, requires_grad=True)
    torch.nn.functional.conv2d(x, w, stride=2).sum().backward()

Outputs and gradients of all other widths (1 to 64), kernels, strides, sides and batches agree with the plain order, and
leave the heap whole (``tests/runtime/test_layout.py``).
"""


def put_channels_last(model: nn.Module) -> None:
    """Reorder the weights of the model's convolutions, which are a third faster then; the values stay as they are.

    What a convolution returns has the order of its weights, and so has all that follows. So a model stays as it is if
    one of its convolutions is unsafe, or is none of torch's own modules.
    """
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    known = {id(module.weight) for module in convolutions}
    if any(map(_is_unsafe, convolutions)) or any(w.ndim == 4 and id(w) not in known for w in model.parameters()):
        return
    for module in convolutions:
        module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)


def _is_unsafe(convolution: nn.Conv2d) -> bool:
    strided_pointwise = max(convolution.kernel_size) == 1 and max(convolution.stride) > 1
    return strided_pointwise and convolution.in_channels // convolution.groups < SAFE_CHANNELS
