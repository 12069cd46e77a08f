"""A student as an ONNX file, which is compared with the torch model on real inputs before it is kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from feddf.config.errors import FeddfError, first_line
from feddf.evaluate import evaluating
from feddf.runtime.packages import onnxruntime, silence

TOLERANCE = 1e-3
"""The most that a logit of the ONNX file may differ by, relative to the largest logit."""


def write_onnx(model: nn.Module, inputs: Tensor, path: Path) -> float:
    """Write a model as ONNX, for batches of any size, and return the largest difference of a logit on ``inputs``.

    A file that differs is not kept.
    """
    try:
        with evaluating(model), torch.inference_mode(mode=False), torch.no_grad(), silence():
            expected: Tensor = model(inputs)
            batch = torch.export.Dim("batch", min=1)
            program = torch.onnx.export(
                model, (inputs,), dynamo=True, dynamic_shapes=({0: batch},), input_names=["inputs"],
                output_names=["logits"], verbose=False,
            )  # fmt: skip
            assert program is not None, "dynamo=True gives a program"
            program.save(path, external_data=False)
        found = _run(path, inputs)
        one = _run(path, inputs[:1])
    except (ImportError, ModuleNotFoundError) as error:
        raise FeddfError(
            f"an ONNX file needs the packages onnx and onnxscript: pip install 'feddf[onnx]' ({error})"
        ) from error
    except Exception as error:  # the exporter may fail in any way
        path.unlink(missing_ok=True)
        raise FeddfError(f"the student cannot be written as ONNX: {first_line(error)}") from error
    difference = max(
        float((found - expected).abs().max()),
        float((one - expected[:1]).abs().max()),
    )
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        path.unlink(missing_ok=True)
        raise FeddfError(f"the ONNX file gives other logits than the student: they differ by up to {difference:g}")
    return difference


def _run(path: Path, inputs: Tensor) -> Tensor:
    session = onnxruntime().InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(np.asarray(session.run(None, {"inputs": inputs.numpy()})[0]))
