"""The work with Flower's own simulation, as its PyTorch tutorial writes it: FedAvg, a DataLoader and a plain loop."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}

import torch
import torch.nn.functional as F
from common import MEAN, NETWORKS, STD, Stopwatch, Work, report, shard
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

watch = Stopwatch()
last: dict[str, Tensor] = {}
client, server = ClientApp(), ServerApp()


class Images(Dataset[tuple[Tensor, Tensor]]):
    """One client's images, each normalized when it is taken, as torchvision's transforms do."""

    def __init__(self, work: Work, number: int) -> None:
        self.images, self.labels = shard(work, number)
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return (self.images[index].float() / 255 - self.mean) / self.std, self.labels[index]


@client.train()
def train(message: Message, context: Context) -> Message:
    work = Work.given()
    model = NETWORKS[work.network]()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
    data = Images(work, int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=work.rate)
    model.train()
    running = 0.0
    for _ in range(work.epochs):
        for images, labels in DataLoader(data, batch_size=work.batch, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            running += loss.item()
    metrics = MetricRecord({"train_loss": running, "num-examples": len(data)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


class Timed(FedAvg):
    """FedAvg that notes when rounds begin and end."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        watch.begin()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        found = super().aggregate_train(server_round, replies)
        if found[0] is not None:
            last.update(found[0].to_torch_state_dict())
        watch.end(Work.given(), lambda: last)
        return found


@server.main()
def main(grid: Grid, context: Context) -> None:
    work = Work.given()
    strategy = Timed(
        fraction_train=work.cohort / work.clients,
        fraction_evaluate=0.0,
        min_train_nodes=work.cohort,
        min_evaluate_nodes=0,
        min_available_nodes=work.clients,
    )
    strategy.start(grid=grid, initial_arrays=ArrayRecord(NETWORKS[work.network]().state_dict()), num_rounds=work.rounds)


if __name__ == "__main__":
    given = Work.given()
    torch.manual_seed(given.seed)
    random.seed(given.seed)  # draws the clients
    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": given.workers, "include_dashboard": False},
    }
    run_simulation(server, client, given.clients, backend_config=backend)
    report(given, watch, last)
