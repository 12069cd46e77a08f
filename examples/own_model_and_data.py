"""Your own nn.Module together with one of feddf's, on your own data, with two worker processes.

    python examples/own_model_and_data.py

Worker processes import this file again, so what runs stands behind ``if __name__ == "__main__"``.
"""

from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from feddf import (
    Client,
    ClientsConfig,
    DistillConfig,
    Examples,
    Federation,
    Inputs,
    LocalConfig,
    PartitionConfig,
    Processes,
    Prototype,
    Resources,
    ServerState,
    accuracy,
    average,
    feddf,
    iid,
    init_state,
    local_update,
    make_ensemble,
    make_students,
    run_rounds,
)
from feddf.models.small import MLP
from feddf.outputs import classes

FEATURES, CLASSES = 20, 4


class Gated(nn.Module):
    """Any module from encoded inputs to logits will do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(FEATURES, width), nn.Linear(FEATURES, width)
        self.out = nn.Linear(width, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.value(inputs) * self.gate(inputs).sigmoid())


def encode(raw: Tensor) -> Tensor:
    """How a raw batch becomes what the models expect; here the features need no more than scaling."""
    return raw / 2


def make_data(n: int, seed: int) -> Examples:
    """Stand-in for your measurements: four clusters that overlap."""
    generator = torch.Generator().manual_seed(seed)
    centers = 1.5 * torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (n,), generator=generator)
    return Examples(
        Inputs(centers[labels] + 2 * torch.randn(n, FEATURES, generator=generator), encode), labels, classes(CLASSES)
    )


def main() -> None:
    train, validation, test, pool = (make_data(n, seed) for n, seed in ((1200, 1), (200, 2), (1000, 3), (1000, 4)))
    prototypes = {
        "gated": Prototype("gated", partial(Gated, width=16)),
        "mlp": Prototype("mlp", partial(MLP, (FEATURES,), CLASSES, width=32)),
    }
    shards = iid(train.labels, 6, PartitionConfig(), n_classes=CLASSES, seed=0)  # or an index tensor for each site
    clients = [Client(f"site-{k}", ("gated", "mlp")[k % 2], shard) for k, shard in enumerate(shards)]
    local = partial(
        local_update, prototypes=prototypes, train=train, local=LocalConfig(epochs=5, batch_size=32, lr=0.1)
    )
    server = ServerState(0, {name: init_state(prototype, seed=0) for name, prototype in prototypes.items()})
    with Processes(workers=2) as engine:
        ensemble = make_ensemble(prototypes, pool.inputs, engine)
        students = make_students(Resources(prototypes, pool.inputs, validation), DistillConfig(steps=200), engine)
        fuse = feddf(average, ensemble, students)
        federation = Federation(clients, ClientsConfig(total=6, fraction=1.0), seed=0)
        for closed in islice(run_rounds(server, federation, engine=engine, train=local, fuse=fuse), 3):
            for name, prototype in prototypes.items():
                fused = accuracy(prototype.load(closed.server.models[name]), test)
                print(f"round {closed.server.round}: {name} {fused:.3f}")


if __name__ == "__main__":
    main()
