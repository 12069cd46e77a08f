"""The server: feddf's strategy with the pool, the validation and the test images."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from feddf.flower import strategy_of
from feddf_cifar.experiment import experiment_of

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = strategy_of(experiment_of(context.run_config), str(context.run_config["folder"]))
    strategy.start(grid)
