"""Run a preset or a configuration file in Flower's simulation: its clients on Ray, one CPU each, run.workers at a time.

pip install 'feddf[flower,ray,demo]'
python examples/flower-simulation/simulate.py demo rounds=3 seed=0 --out runs/demo-flower
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from feddf import Experiment, RunFolder, load
from feddf.flower import FedDF, client_app_of, strategy_of
from feddf.states import digest


def simulate(experiment: Experiment, folder: Path, after: Callable[[Grid, FedDF], None] | None = None) -> str:
    """Run the experiment, or what is left of it in the folder; return the digest of its models."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from flwr.simulation import run_simulation

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = strategy_of(experiment, folder)
        strategy.start(grid)
        if after is not None:
            after(grid, strategy)

    started = {"include_dashboard": False, "num_cpus": experiment.run.workers}  # of Ray; by default all CPUs
    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": started}
    clients = client_app_of(experiment, states=(folder / "clients").resolve())  # what some methods keep between rounds
    run_simulation(server, clients, experiment.clients.total, backend_config=backend)
    saved, _ = RunFolder.open(folder).latest()
    assert saved is not None
    return digest(saved.models)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", help="a preset, or a TOML file")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--out", type=Path, required=True, help="the run folder")
    given = parser.parse_args()
    print("digest of the models:", simulate(load(given.experiment, given.overrides), given.out))
