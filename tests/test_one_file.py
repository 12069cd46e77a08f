"""``examples/feddf_in_one_file.py`` and the package are the same algorithm."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from feddf.client import local_update
from feddf.config import ClientsConfig, DistillConfig, LocalConfig
from feddf.data.datasets import plain
from feddf.engines import in_process
from feddf.fusion.average import average
from feddf.fusion.distill import make_students
from feddf.fusion.ensemble import make_ensemble
from feddf.fusion.feddf import feddf
from feddf.outputs import classes
from feddf.rounds import Federation, run_round
from feddf.states import copy, init_state
from feddf.types import Client, Examples, Inputs, Prototype, Resources, ServerState

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import feddf_in_one_file as one_file


def loaded(prototype: Prototype, state: dict[str, Tensor]) -> nn.Module:
    model = prototype.build()
    model.load_state_dict(state)
    return model


def test_a_round_of_both_ends_with_the_same_weights() -> None:
    """Without shuffling noise: every batch is the whole of what there is, so that only rounding is left."""
    torch.manual_seed(3)
    x, y = one_file.spirals(120)
    pool = 6 * torch.rand(64, 2) - 3
    prototypes = {name: Prototype(name, partial(one_file.mlp, width)) for name, width in (("large", 12), ("small", 6))}
    names, shares = ("small", "large", "small"), [torch.arange(0, 50), torch.arange(50, 80), torch.arange(80, 120)]
    starts = {name: copy(init_state(prototype, 0)) for name, prototype in prototypes.items()}

    averaged, fused = one_file.feddf_round(
        {name: loaded(prototypes[name], state) for name, state in starts.items()},
        [(name, x[share], y[share]) for name, share in zip(names, shares, strict=True)],
        pool,
        epochs=3,
        steps=8,
        batch=64,
        lr=0.1,
        distill_lr=1e-3,
    )

    train = Examples(Inputs(x, plain), y, classes(3))
    resources = Resources(prototypes, Inputs(pool, plain))
    students = make_students(
        resources, DistillConfig(steps=8, batch_size=64, lr=1e-3, early_stopping="none"), in_process
    )
    closed = run_round(
        ServerState(0, starts),
        Federation(
            [Client(f"c{k}", name, share) for k, (name, share) in enumerate(zip(names, shares, strict=True))],
            ClientsConfig(total=3, fraction=1.0),
        ),
        engine=in_process,
        train=partial(
            local_update, prototypes=prototypes, train=train, local=LocalConfig(epochs=3, batch_size=64, lr=0.1)
        ),
        fuse=feddf(average, make_ensemble(prototypes, resources.pool, in_process), students),
    )
    for name in prototypes:
        for key, tensor in averaged[name].state_dict().items():
            torch.testing.assert_close(closed.fused.start[name][key], tensor, atol=1e-6, rtol=1e-5)
        for key, tensor in fused[name].state_dict().items():
            torch.testing.assert_close(closed.server.models[name][key], tensor, atol=2e-5, rtol=1e-4)
            assert not torch.equal(tensor, averaged[name].state_dict()[key]), "the student has moved"


def test_it_is_short_and_needs_nothing_but_torch() -> None:
    text = Path(one_file.__file__).read_text()
    assert len(text.splitlines()) <= 120
    imported = {
        line.split()[1].partition(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))
    }
    assert imported == {"__future__", "copy", "torch"}
