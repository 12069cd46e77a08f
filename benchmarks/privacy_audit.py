"""Attacks on what is claimed private: ``python -m benchmarks.privacy_audit``.

The one-run audit of ``feddf audit`` at ε = 1 and 2, with the planned noise, half of it and none; and a membership
attack from answers, LiRA (Carlini et al. 2022) in its distillation form (arXiv 2502.08001): the server distills what a
client's head answers to a pool into a student, and compares the student's confidence about a record with that of
students of shadow clients, which had the record or had not. It needs the features of ``benchmarks.privacy``. Figures
go to ``benchmarks/results/privacy_audit.json``, ROC curves to ``docs/pictures/privacy-roc.svg``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from torch import Tensor

from benchmarks.privacy import FEATURES
from feddf.config.privacy import PrivacyConfig
from feddf.privacy.accountant import make_plan, noise_for
from feddf.privacy.audit import canary_scores, lower_bounds
from feddf.privacy.audit import roc as rates
from feddf.privacy.noise import Noise
from feddf.privacy.records import extended, released, solve_heads

mpl.use("svg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
CANARIES, SHADOWS, RECORDS, POOL = 20_000, 128, 400, 2000
EPOCHS = 4
Curve = tuple[np.ndarray, np.ndarray]


def roc(scores: Tensor, included: Tensor) -> Curve:
    """Return false and true positive rates at every threshold."""
    false, true = rates(scores, included)
    return false.numpy(), true.numpy()


def figures(curve: Curve) -> dict[str, float]:
    false, true = curve
    at = float(true[false <= 0.01].max(initial=0.0))
    return {"auc": round(float(np.trapezoid(true, false)), 4), "true positives at 1 % false": round(at, 4)}


def canaries() -> tuple[list[dict[str, Any]], dict[str, Curve]]:
    rows, curves = [], {}
    levels = {"weights": "client", "answers": "client", "votes": "client", "heads": "record", "dp-sgd": "record"}
    for on, level in levels.items():
        for epsilon in (1.0, 2.0):
            privacy = PrivacyConfig(level=level, mechanism=on, epsilon=epsilon, sampling=0.25)
            plan = make_plan(privacy, 1, EPOCHS)
            for scale in (1.0, 0.5, 1e-9):
                scores, included = canary_scores(plan, CANARIES, scale)
                found = lower_bounds(plan, scores, included)
                curve = roc(scores, included)
                bounds = {"any mechanism": round(found["lower bound"], 3)}
                bounds |= {"this mechanism": round(found["bound for this mechanism"], 3)}
                row = {"on": on, "claimed": epsilon, "noise": round(scale, 3), "lower bounds": bounds, **figures(curve)}
                rows.append(row)
                print(json.dumps(row), flush=True)
                if epsilon == 1.0 and scale > 1e-3:
                    curves[f"{on}, {round(scale, 3):g} × the noise"] = tuple(one[::20] for one in curve)
    return rows, curves


def confidences(features: Tensor, labels: Tensor, heads: tuple[Tensor, Tensor], pool: Tensor) -> Tensor:
    """Return log p/(1 − p) of each record's label, for the student of each head (K × n).

    A student is the least-squares fit to the head's log-probabilities on the pool.
    """
    weight, bias = heads
    answers = (pool @ weight.mT + bias.unsqueeze(1)).log_softmax(dim=-1)
    design = torch.cat([pool, torch.ones(len(pool), 1).double()], dim=1)
    students = torch.linalg.lstsq(design.expand(len(answers), -1, -1), answers).solution
    logits = torch.cat([features, torch.ones(len(features), 1).double()], dim=1) @ students
    p = logits.softmax(dim=-1)[:, torch.arange(len(labels)), labels].clamp(1e-9, 1 - 1e-9)
    return (p / (1 - p)).log()


def lira(epsilon: float | None, regularization: float) -> Curve:
    """Return the ROC curve of the attack on one client's records, with shadows that have the same noise."""
    found = np.load(FEATURES)
    order = np.random.default_rng(0).permutation(len(found["train_x"]))
    x, y = torch.from_numpy(found["train_x"][order]).double(), torch.from_numpy(found["train_y"][order]).long()
    pool, features, labels = x[:POOL], x[POOL : POOL + RECORDS], y[POOL : POOL + RECORDS]
    draw = torch.Generator().manual_seed(1)
    inside = torch.rand(SHADOWS + 32, RECORDS, generator=draw) < 0.5  # the last 32 are attacked
    noise = Noise(noise_for(epsilon, 1e-5) if epsilon else 0.0)
    rows = features.expand(len(inside), -1, -1)
    solved = solve_heads(extended(rows, 1.0), labels.expand(len(inside), -1).where(inside, -1), 4, regularization)
    heads = released(solved, noise, PrivacyConfig(regularization=regularization))
    scores = confidences(features, labels, heads, pool)
    shadows, there = scores[:SHADOWS], inside[:SHADOWS]
    likelihoods = []
    for mask in (there, ~there):
        mean = shadows.where(mask, torch.nan).nanmean(dim=0)
        deviation = (shadows - mean).where(mask, torch.nan).square().nanmean(dim=0).sqrt().clamp(min=1e-9)
        likelihoods.append(torch.distributions.Normal(mean, deviation).log_prob(scores[SHADOWS:]))
    return roc((likelihoods[0] - likelihoods[1]).flatten(), inside[SHADOWS:].flatten())


def picture(panels: dict[str, dict[str, Curve]]) -> None:
    _, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4.5))
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for name, (false, true) in curves.items():
            axis.plot(np.maximum(false, 1e-4), np.maximum(true, 1e-4), label=name, linewidth=1)
        line = np.geomspace(1e-4, 1, 50)
        axis.plot(line, line, "k:", linewidth=1)
        axis.plot(line, np.minimum(1, np.e * line), "k--", linewidth=1, label="most at ε = 1")
        axis.set(xscale="log", yscale="log", title=title, xlabel="false positives", ylabel="true positives")
        axis.legend(fontsize=7)
    plt.tight_layout()
    plt.savefig(HERE.parent / "docs" / "pictures" / "privacy-roc.svg", metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    attacks, membership = [], {}
    for regularization in (0.1, 30.0):
        for epsilon in (None, 8.0, 1.0):
            curve = lira(epsilon, regularization)
            attacks.append({"regularization": regularization, "epsilon": epsilon, **figures(curve)})
            print(json.dumps(attacks[-1]), flush=True)
            said = f"ε = {epsilon:g}" if epsilon else "no noise"
            membership[f"Λ = {regularization:g}, {said}"] = curve
    rows, curves = canaries()
    kept = {"canaries": rows, "lira": attacks, "number of canaries": CANARIES, "shadows": SHADOWS}
    (HERE / "results" / "privacy_audit.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    picture({"canaries, ε = 1 claimed": curves, "LiRA from answers": membership})


if __name__ == "__main__":
    main()
