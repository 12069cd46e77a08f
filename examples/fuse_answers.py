"""One network out of a random forest, an ONNX file and a table of answers; no data is handed out.

pip install 'feddf[demo,images,onnx]' skl2onnx && python examples/fuse_answers.py

Three sites know different digits. The first has a random forest and hands out what that says about agreed images, the
second hands out its model, and the third is a service that any program can ask: what it says is written as CSV.
"""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from skl2onnx import to_onnx
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier


def feddf(*words: str) -> None:
    print("$ feddf", *words, flush=True)
    subprocess.run([sys.executable, "-m", "feddf", *words], check=True)


# The agreed images, without labels, and labeled ones that only the report sees: as files, 8×8 pixels each.
pixels, labels = load_digits(return_X_y=True)
images = np.round(pixels * 255 / 16).astype(np.uint8)
sites, pool, test = np.split(np.random.default_rng(0).permutation(len(images)), [700, 1500])
for number in pool:
    Path("pool").mkdir(exist_ok=True)
    Image.fromarray(images[number].reshape(8, 8)).save(f"pool/{number:04}.png")
for number in test:
    folder = Path("test", str(labels[number]))
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(images[number].reshape(8, 8)).save(folder / f"{number:04}.png")
feddf("pool", "--unlabeled", "pool", "--out", "pool.json")  # all sites answer for these, in this order


def own(digits: range) -> tuple[np.ndarray, np.ndarray]:
    """Return a site's examples: of its digits, with values of 0 to 1."""
    chosen = sites[np.isin(labels[sites], digits)]
    return images[chosen].astype(np.float32) / 255, labels[chosen]


# Site A knows 0 to 5. Its forest stays where it is, as an ONNX file that feddf can ask; its answers are handed out.
forest = RandomForestClassifier(200, random_state=0).fit(*own(range(6)))
Path("forest.onnx").write_bytes(to_onnx(forest, own(range(6))[0][:1]).SerializeToString())
feddf("ask", "forest.onnx", "--unlabeled", "pool", "--pool", "pool.json", "--out", "forest.answers")

# Site B knows 4 to 9, and hands out its model.
regression = LogisticRegression(max_iter=1000).fit(*own(range(4, 10)))
Path("site-b.onnx").write_bytes(to_onnx(regression, own(range(4, 10))[0][:1]).SerializeToString())

# Site C knows 2 to 7. A program asks it, and writes a row for each input of pool.json: its name, and a column a class.
service = KNeighborsClassifier(5).fit(*own(range(2, 8)))
with Path("service.csv").open("w", newline="") as file:
    table = csv.writer(file)
    table.writerow(["input", *service.classes_])
    for name in json.loads(Path("pool.json").read_text())["inputs"]:
        image = np.asarray(Image.open(Path("pool", name)), np.float32).reshape(1, -1) / 255
        table.writerow([name, *service.predict_proba(image)[0]])

teachers = ("forest.answers", '{path = "site-b.onnx", mean = [0.0], std = [1.0]}', "service.csv")
student = '{model = "cnn", size = 8, channels = 1, mean = [0.3], std = [0.4]}'
words = [word for teacher in teachers for word in ("--teacher", teacher)]
words += ["--student", student, "--unlabeled", "pool", "--test", "test", "--out", "fused"]
feddf("fuse", *words, "distill.steps=600", "distill.eval_every=100")
feddf("contributions", "fused")
