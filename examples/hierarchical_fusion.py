"""Fusion in two levels: four regions fuse their own clients, and the server fuses the regions' models.

What a fusion returns is a model like any client's, so it can be fused again. The server hears from four regions instead
of twelve clients, and no region's clients are known outside of it. Flat fusion of the same clients is printed as well.

pip install 'feddf[demo]' && python examples/hierarchical_fusion.py
"""

from functools import partial

from feddf import (
    DATASETS,
    Client,
    ClientsConfig,
    DataConfig,
    DistillConfig,
    Federation,
    LocalConfig,
    PartitionConfig,
    Prototype,
    Resources,
    ServerState,
    Update,
    accuracy,
    average,
    dirichlet,
    feddf,
    in_process,
    init_state,
    local_update,
    make_ensemble,
    make_students,
    match_inputs,
    run_round,
    split,
)
from feddf.models.small import CNN

digits, others = (DATASETS[name](DataConfig(name=name)) for name in ("mnist-5k", "digits"))
pool = match_inputs(others.train.inputs.raw, like=digits.train.inputs)
rest, held_out = split(len(digits.train), 0.1, seed=0)
train, validation = digits.train.take(rest), digits.train.take(held_out)
prototypes = {"cnn": Prototype("cnn", partial(CNN, digits.shape, 10, width=8))}
shards = dirichlet(train.labels, 12, PartitionConfig(alpha=0.3), n_classes=10, seed=0)
clients = [Client(f"client-{k:02d}", "cnn", shard) for k, shard in enumerate(shards)]

everyone = ClientsConfig(total=12, fraction=1.0)
local = partial(local_update, prototypes=prototypes, train=train, local=LocalConfig(epochs=5, lr=0.05))
students = make_students(
    Resources(prototypes, pool, validation), DistillConfig(steps=100, eval_every=50, batch_size=32), in_process
)
fuse = feddf(average, make_ensemble(prototypes, pool, in_process), students)
run = partial(run_round, engine=in_process, train=local, fuse=fuse)


def flat(server: ServerState) -> ServerState:
    return run(server, Federation(clients, everyone, seed=0)).server


def in_regions(server: ServerState) -> ServerState:
    """Run a round in each region, and fuse what the regions send as if they were clients."""
    updates = []
    for number in range(4):
        closed = run(server, Federation(clients[3 * number : 3 * number + 3], everyone, seed=0))
        examples = sum(update.n_examples for update in closed.updates)
        updates.append(Update(f"region-{number}", "cnn", server.round + 1, closed.server.models["cnn"], examples))
    return fuse(server, updates, server.round).server


first = ServerState(0, {"cnn": init_state(prototypes["cnn"], seed=0)})
for name, one_round in (("flat", flat), ("in regions", in_regions)):
    server = first
    for _ in range(3):
        server = one_round(server)
        reached = accuracy(prototypes["cnn"].load(server.models["cnn"]), digits.test)
        print(f"{name}, round {server.round}: {reached:.3f}")
