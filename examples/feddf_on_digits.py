"""FedDF from its pieces: ten clients with skewed digits, one architecture, an unlabeled pool of other digits.

pip install 'feddf[demo]' && python examples/feddf_on_digits.py
"""

from functools import partial
from itertools import islice

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
    run_rounds,
    split,
)
from feddf.models.small import CNN

# Data: the clients' private digits, the server's validation part, and a pool without labels.
digits, others = (DATASETS[name](DataConfig(name=name)) for name in ("mnist-5k", "digits"))
pool = match_inputs(others.train.inputs.raw, like=digits.train.inputs)
rest, held_out = split(len(digits.train), 0.1, seed=0)
train, validation = digits.train.take(rest), digits.train.take(held_out)

# Clients: each has its own mix of classes.
prototypes = {"cnn": Prototype("cnn", partial(CNN, digits.shape, 10, width=8))}
shards = dirichlet(train.labels, 10, PartitionConfig(alpha=0.1), n_classes=10, seed=0)
clients = [Client(f"client-{k}", "cnn", shard) for k, shard in enumerate(shards)]

# The round: local training (Algorithm 2), then fusion (Algorithm 1), which is an average, an ensemble and students.
local = partial(local_update, prototypes=prototypes, train=train, local=LocalConfig(epochs=5, lr=0.05))
ensemble = make_ensemble(prototypes, pool, in_process)
students = make_students(Resources(prototypes, pool, validation), DistillConfig(steps=200), in_process)
fuse = feddf(average, ensemble, students)

server = ServerState(0, {name: init_state(prototype, seed=0) for name, prototype in prototypes.items()})
federation = Federation(clients, ClientsConfig(total=10, fraction=0.6), seed=0)
for closed in islice(run_rounds(server, federation, engine=in_process, train=local, fuse=fuse), 3):
    models = {"averaged": closed.fused.start, "fused": closed.server.models}
    found = {name: accuracy(prototypes["cnn"].load(state["cnn"]), digits.test) for name, state in models.items()}
    print(f"round {closed.server.round}: averaged {found['averaged']:.3f}, fused {found['fused']:.3f}")
