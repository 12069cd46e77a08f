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
told = json.loads(run_config)
nodes = [Node(client, json.loads(config), run_config=told) for config in node_configs]
grid = LocalGrid({10 + number: node for number, node in enumerate(nodes)})
server(grid, Context(1, 1, {}, RecordDict(), told))
