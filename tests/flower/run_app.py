"""Run a Flower app as Flower would, but with all nodes in this process: FOLDER PACKAGE RUN_CONFIG [NODE_CONFIG ...]."""

from __future__ import annotations

import json
import sys
from importlib import import_module

import torch
from flwr.app import Context, RecordDict
from local_grid import LocalGrid, Node

folder, package, run_config, *node_configs = sys.argv[1:]
torch.manual_seed(0)
sys.path.insert(0, folder)
client, server = (import_module(f"{package}.{side}_app").app for side in ("client", "server"))
grid = LocalGrid({10 + number: Node(client, json.loads(config)) for number, config in enumerate(node_configs)})
server(grid, Context(1, 1, {}, RecordDict(), json.loads(run_config)))
