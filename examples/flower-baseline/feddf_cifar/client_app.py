"""A client: its shard, its architecture, and feddf's local training."""

from functools import partial

from flwr.app import Context
from flwr.clientapp import ClientApp

from feddf import MODELS, Examples
from feddf.data.datasets import flip_crop
from feddf.flower import client_app
from feddf_cifar.experiment import experiment_of, task_of

SHAPE, CLASSES = (3, 32, 32), 10
ARCHITECTURES = ("resnet8", "resnet20", "resnet32", "shufflenetv2", "vgg9")


def architecture(context: Context) -> str:
    labels = [one.label for one in experiment_of(context.run_config).prototypes]
    return labels[int(context.node_config["partition-id"]) % len(labels)]


def shard(context: Context) -> Examples:
    task = task_of(experiment_of(context.run_config).model_dump_json())
    return task.train.take(task.shards[int(context.node_config["partition-id"])])


app: ClientApp = client_app(
    {name: partial(MODELS[name], SHAPE, CLASSES) for name in ARCHITECTURES},
    shard,
    prototype=architecture,
    augment=flip_crop,
)
