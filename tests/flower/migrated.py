"""Run the app in the folder given, as Flower would, but with all nodes in this process; print what it logs."""

from __future__ import annotations

import sys

import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from local_grid import LocalGrid, Node

torch.manual_seed(0)
sys.path.insert(0, sys.argv[1])
from digits import client_app, server_app, task  # noqa: E402

client: ClientApp = client_app.app
server: ServerApp = server_app.app
grid = LocalGrid({10 + number: Node(client, {"partition-id": number}) for number in range(task.CLIENTS)})
server(grid, Context(1, 1, {}, RecordDict(), {"rounds": 3, "folder": sys.argv[2]}))
