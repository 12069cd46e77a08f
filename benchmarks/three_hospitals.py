"""Three segmentation models of three makers, each of which knows other classes, fused from the command line.

``python benchmarks/three_hospitals.py OUT [SEED]`` trains a U-Net (a folder of feddf), a dilated network (ONNX) and a
small fully convolutional one (``.pt2``) on the scenes of ``digit-scenes``, each on one site, which labels two of the
six digits and calls everything else background. Then it runs ``feddf fuse`` and ``feddf predict``, and prints the mean
IoU on all 2,000 test scenes. ``python benchmarks/three_hospitals.py OUT SEED STEPS`` distills for another time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from feddf.config import DataConfig
from feddf.data.composed import SITES, digit_scenes
from feddf.models.positions import DilatedCNN, UNet
from feddf.outputs import classes
from feddf.runtime.packages import silence
from feddf.saved.model import Images, ModelSpec

SHAPE, PLACES = (3, 32, 32), (32, 32)


def plain_network(channels: int) -> nn.Module:
    layers = [nn.Conv2d(3, 24, 5, padding=2), nn.ReLU(), nn.Conv2d(24, 24, 5, padding=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(24, 24, 5, padding=4, dilation=2), nn.ReLU(), nn.Conv2d(24, channels, 1))


def train(model: nn.Module, inputs: Tensor, labels: Tensor, steps: int, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        chosen = torch.randint(0, len(inputs), (32,), generator=generator)
        loss = F.cross_entropy(model(inputs[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main(out: Path, seed: int = 0, steps: int = 1500) -> None:
    data = digit_scenes(DataConfig(name="digit-scenes"))
    encode = data.train.inputs.encode
    fed = Images(SHAPE, encode.mean, encode.std)  # type: ignore[attr-defined]
    networks = [UNet(SHAPE, 3, PLACES, width=8), DilatedCNN(SHAPE, 3, PLACES, width=16), plain_network(3)]
    names, places = data.classes, []
    for number, (network, known) in enumerate(zip(networks, SITES, strict=True)):
        torch.manual_seed(seed * 10 + number)
        for module in network.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
        chosen = (data.train.groups == number).nonzero().flatten()
        own = torch.zeros(len(names), dtype=torch.int64).index_copy(0, torch.tensor(known), torch.arange(3))
        labels = own[data.train.labels[chosen]]  # of a class that the site does not know: background
        model = train(network, data.train.inputs.batch(chosen), labels, 600, seed)
        listed = tuple(names[one] for one in known)
        places.append(written(model, number, listed, fed, out))
    pictures = out / "pictures"
    pictures.mkdir()
    for number, row in enumerate(data.test.inputs.raw[torch.arange(4)]):
        Image.fromarray(np.ascontiguousarray(row.permute(1, 2, 0).numpy())).save(pictures / f"{number}.png")
    said = [word for one in places for word in ("--teacher", one)]
    words = ["--student", '{model = "unet", options = {width = 8}}']
    words += ["--unlabeled", '{name = "digit-scenes", size = 4000}', "--test", "digit-scenes"]
    learn = [f"distill.steps={steps}", "distill.batch_size=32", "distill.lr=0.01", "distill.eval_every=100"]
    fused, rest = str(out / "fused"), [f"seed={seed}", *learn, "run.threads=1", f"cache={out / 'cache'}"]
    run("fuse", *said, *words, "--onnx", "--trust", "--out", fused, *rest)
    run("predict", fused, str(pictures), "--out", str(out / "masks"))
    print(json.dumps({"seed": seed, "steps": steps, **scores_of(out / "fused")}))


def scores_of(fused: Path) -> dict[str, float]:
    """Return each model's mean IoU on the test scenes, and the share of the ensemble's gain that the student keeps."""
    found = json.loads((fused / "report.json").read_text())["sets"]["test"]
    scores = {name: round(figures["accuracy"], 4) for name, figures in found.items()}
    best = max(score for name, score in scores.items() if name not in ("ensemble", "student"))
    return {**scores, "share": round((scores["student"] - best) / (scores["ensemble"] - best), 3)}


def written(model: nn.Module, number: int, listed: tuple[str, ...], fed: Images, out: Path) -> str:
    """Write a model as its maker does, and return what --teacher has to say of it."""
    said = {"classes": list(listed), "mean": list(fed.mean), "std": list(fed.std)}
    values = ", ".join(f"{name} = {json.dumps(value)}" for name, value in said.items())
    example, batch = torch.zeros(2, *SHAPE), torch.export.Dim("batch", min=1)
    if number == 0:
        folder = out / "liver-unet"
        folder.mkdir(parents=True)
        form = classes(3, PLACES, background=0).form
        spec = ModelSpec("unet", SHAPE, listed, fed, {"width": 8}, form=form)
        save_file(model.state_dict(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"feddf": spec.describe()}))
        return str(folder)
    if number == 1:
        path = out / "spleen.onnx"
        with silence():
            program = torch.onnx.export(model, (example,), dynamo=True, dynamic_shapes=({0: batch},))
        program.save(path, external_data=False)  # type: ignore[union-attr]
        return f'{{path = "{path}", {values}}}'
    path = out / "kidney.pt2"
    torch.export.save(torch.export.export(model, (example,), dynamic_shapes=({0: batch},)), path)
    return f'{{path = "{path}", {values}}}'


def run(*words: str) -> None:
    print("$ feddf", *words, flush=True)
    subprocess.run([str(Path(sys.executable).parent / "feddf"), *words], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
