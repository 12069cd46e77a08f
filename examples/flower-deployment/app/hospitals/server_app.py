"""The coordinator: it holds unlabeled images, some labelled ones to judge by, and no patient of any site."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from feddf.flower import FedDF
from hospitals.task import ARCHITECTURES, read

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    data = str(context.run_config["data"])
    strategy = FedDF(
        ARCHITECTURES,
        pool=read(data, "pool")[0],
        validation=read(data, "validation"),
        test=read(data, "test"),
        folder=str(context.run_config["folder"]),
        clients=3,
        quorum=0.6,
        deadline=100.0,
        wait=30.0,
        local_epochs=20,
        local_batch=32,
        local_rate=0.1,
        distill_steps=200,
        distill_check=50,
        evaluate_fraction=1.0,
    )
    strategy.start(grid, num_rounds=int(context.run_config["rounds"]))
