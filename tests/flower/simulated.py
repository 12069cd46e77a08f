"""Run a toy experiment in Flower's own simulation; print its digest. A program, because Flower owns its process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from feddf.flower import client_app_of, strategy_of
from feddf.flower.post import Post
from feddf.flower.private import has_no_such_function
from feddf.runs.config import parse
from feddf.states import digest


def main(config: Path, folder: Path) -> None:
    experiment = parse(json.loads(config.read_text()))
    server = ServerApp()
    found: dict[str, object] = {}

    @server.main()
    def play(grid: Grid, context: Context) -> None:
        strategy = strategy_of(experiment, folder)
        strategy.start(grid)
        found["digest"] = digest(strategy.models)
        node = next(iter(grid.get_node_ids()))
        post = Post(grid)
        sent = post.push(Message(RecordDict(), node, "query.nothing"))
        assert sent is not None
        while not (replies := list(post.pull([sent]))):
            pass
        _, reply = replies[0]
        found["no such function"] = isinstance(reply, Message) and has_no_such_function(reply)

    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"include_dashboard": False}}
    run_simulation(server, client_app_of(experiment), experiment.clients, backend_config=backend)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
