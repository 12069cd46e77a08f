"""The work with pfl-research: FederatedAveraging in its SimulatedBackend; torchrun starts one process a worker."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import MEAN, NETWORKS, SHARDS, STD, Stopwatch, Work, report, shard
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints, WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.data.user_state import DiskUserStateStorage
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Network(nn.Module):
    """A network with the two methods that pfl calls."""

    mean = torch.tensor(MEAN).view(-1, 1, 1)
    std = torch.tensor(STD).view(-1, 1, 1)

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        self.train()
        return F.cross_entropy(self.network((images.float() / 255 - self.mean) / self.std), labels)

    @torch.no_grad()
    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
        return {"loss": Weighted(float(self.loss(images, labels)) * len(labels), len(labels))}


class Watch(TrainingProcessCallback):
    """Notes when rounds end; a round begins when the one before it has ended."""

    def __init__(self, work: Work, network: nn.Module) -> None:
        self.watch, self.work, self.network = Stopwatch(), work, network

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.watch.begin()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        first = os.environ.get("RANK", "0") == "0"  # all processes have the same model
        self.watch.end(self.work if first else replace(self.work, kept=False), self.network.state_dict)
        self.watch.begin()
        return False, Metrics()


def main() -> None:
    work = Work.given()
    torch.set_num_threads(1 if int(os.environ.get("WORLD_SIZE", "1")) > 1 else work.workers)
    np.random.seed(work.seed)
    torch.manual_seed(work.seed)

    def user(number: int) -> PyTorchTensorDataset:
        images, labels = shard(work, number)
        if work.network == "simple_cnn":  # in its benchmark a pixel's channels lie beside each other
            images = images.contiguous(memory_format=torch.channels_last)
        return PyTorchTensorDataset((images, labels), user_id=str(number))

    sampler = get_user_sampler("random", list(range(work.clients)))
    users = FederatedDataset(user, sampler)
    network = Network(NETWORKS[work.network]())
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    watch = Watch(work, network.network)
    known: dict[str, Any] = {
        "central_num_iterations": work.rounds,
        "evaluation_frequency": 1_000_000,  # never but in the first round, which is not counted
        "train_cohort_size": work.cohort,
        "val_cohort_size": None,
    }
    algorithm, params, weighting = FederatedAveraging(), NNAlgorithmParams(**known), WeightByUser()
    if (Path(work.folder) / SHARDS).exists():  # users are not alike
        weighting = WeightByDatapoints()
    if work.method == "scaffold":
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # pfl reads its users' files as torch did before 2.6
        # its documentation calls the other way to compute control variates unstable with CIFAR-10
        kept = DiskUserStateStorage(str(Path(work.folder) / "kept-by-users"))  # any process may have a user next
        more = {"population": work.clients, "use_gradient_as_control_variate": True, "user_state_storage": kept}
        algorithm, params, weighting = SCAFFOLD(), SCAFFOLDParams(**known, **more), WeightByUser()
    algorithm.run(
        algorithm_params=params,
        backend=SimulatedBackend(users, users, postprocessors=[weighting]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=work.epochs, local_learning_rate=work.rate, local_batch_size=work.batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=256),
        callbacks=[watch],
    )
    if int(os.environ.get("RANK", "0")) == 0:
        report(work, watch.watch, network.network.state_dict())


if __name__ == "__main__":
    main()
