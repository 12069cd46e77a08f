"""Install the wheel as a user would, without constraints, and see that it starts, runs and fuses.

    python tools/check_wheel.py dist/feddf-*.whl    # the newest allowed version of every dependency
    python tools/check_wheel.py ... --oldest        # the oldest allowed version of every dependency but torch

The wheel is made by check_dist.py.

Only torch is held, at the version in constraints.txt: its newest build may bring gigabytes of CUDA packages.
It needs a package index, so it is a part of CI and not of the tests.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]

PREPARE = """
from pathlib import Path
import numpy, PIL.Image, safetensors.torch
from feddf import MODELS, Prototype, init_state
from functools import partial

Path("pictures").mkdir()
for number in range(32):
    pixels = numpy.random.default_rng(number).integers(0, 256, (8, 8), dtype="uint8")
    PIL.Image.fromarray(pixels).save(f"pictures/{number}.png")
for number, name in enumerate("ab"):
    state = init_state(Prototype("cnn", partial(MODELS["cnn"], (1, 8, 8), 3)), number)
    safetensors.torch.save_file(dict(state), f"{name}.safetensors")
"""

TEACHER = '{{path = "{}.safetensors", model = "cnn", size = 8, channels = 1, classes = ["x", "y", "z"]}}'
STUDENT = '{model = "mlp", size = 8, channels = 1}'

COMMANDS = (
    ("--help",),
    ("run", "toy", "rounds=2", "--out", "toy"),
    ("report", "toy"),
    ("fuse", "--teacher", TEACHER.format("a"), "--teacher", TEACHER.format("b"), "--student", STUDENT,
     "--unlabeled", "pictures", "--out", "fused", "--cache", "cache", "distill.steps=20"),
    ("predict", "fused", "pictures/0.png"),
)  # fmt: skip


def oldest(requirement: str) -> str:
    """Return a requirement with its lower bound as the only version.

    >>> oldest("rich>=13.7"), oldest("torch")
    ('rich==13.7', 'torch')
    """
    return re.sub(r">=([^,;]+)[^;]*", r"==\1", requirement)


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command; its output is shown only if it fails."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"failed: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def main() -> None:
    """Install, try."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--oldest", action="store_true", help="the oldest allowed versions of everything but torch")
    asked = parser.parse_args()
    pinned = re.search(r"^torch==\S+", (HERE / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None, "constraints.txt pins torch"
    needed = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["dependencies"]
    versions = [oldest(one) for one in needed if not one.startswith("torch")] if asked.oldest else []
    with tempfile.TemporaryDirectory(prefix="feddf-wheel-") as name:
        place = Path(name)
        venv.create(place / "env", with_pip=True)
        programs = place / "env" / "bin"
        pip = (programs / "pip", "--quiet", "--disable-pip-version-check")
        run(*pip, "install", pinned.group(), *versions, cwd=place)
        run(*pip, "install", asked.wheel.resolve(), *versions, cwd=place)
        run(programs / "python", "-c", PREPARE, cwd=place)
        for words in COMMANDS:
            run(programs / "feddf", *words, cwd=place)
        listed = subprocess.run([programs / "pip", "freeze"], capture_output=True, text=True, check=True).stdout.split()
        names = {re.split(r"[><=]", one)[0].replace("-", "_") for one in needed}
        found = [one for one in listed if one.partition("==")[0].replace("-", "_") in names]
        print(f"the wheel starts, runs and fuses with {', '.join(found)}")


if __name__ == "__main__":
    main()
