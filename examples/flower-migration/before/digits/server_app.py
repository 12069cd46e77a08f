"""A Flower server that averages weights: all clients must have the same model."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from digits.task import Net, accuracy, load_test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(fraction_evaluate=0.0)
    arrays = ArrayRecord(Net().state_dict())
    strategy.start(grid, initial_arrays=arrays, num_rounds=int(context.run_config["rounds"]), evaluate_fn=evaluate)


def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": accuracy(model, *load_test())})
