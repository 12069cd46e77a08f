"""A site. Who it is, what it trains and where its data lie are in the configuration of its own SuperNode."""

from flwr.app import Context

from feddf.flower import client_app
from hospitals.task import ARCHITECTURES, read


def told(key: str, context: Context) -> str:
    if key not in context.node_config:
        raise ValueError(f"this SuperNode has no '{key}'; start it with --node-config '{key}=\"...\"'")
    return str(context.node_config[key])


app = client_app(
    ARCHITECTURES,
    data=lambda context: read(told("data", context), "train"),
    test=lambda context: read(told("data", context), "test"),
    prototype=lambda context: told("architecture", context),
    name=lambda context: told("site", context),
)
