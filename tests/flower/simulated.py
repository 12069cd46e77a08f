"""Run a toy experiment in Flower's own simulation; print its digest. A program, because Flower owns its process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from simulate import simulate

from feddf.config import parse
from feddf.flower import FedDF
from feddf.flower.transport import MessageQueue, has_no_such_function


def main(config: Path, folder: Path) -> None:
    found: dict[str, object] = {}

    def ask_for_nothing(grid: Grid, strategy: FedDF) -> None:
        queue = MessageQueue(grid)
        sent = queue.push(Message(RecordDict(), min(grid.get_node_ids()), "query.nothing"))
        assert sent is not None
        while not (replies := list(queue.pull([sent]))):
            pass
        reply = replies[0][1]
        found["no such function"] = isinstance(reply, Message) and has_no_such_function(reply)

    found["digest"] = simulate(parse(json.loads(config.read_text())), folder, after=ask_for_nothing)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
