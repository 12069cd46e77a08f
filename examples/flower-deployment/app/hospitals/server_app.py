"""The coordinator: it holds unlabeled images, some labeled ones to evaluate models on, and no patient of any site."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from feddf import ClientsConfig, DistillConfig, LocalConfig
from feddf.flower import FedDF, FlowerConfig, FlowerSettings
from hospitals.task import ARCHITECTURES, read

app = ServerApp()

SETTINGS = FlowerSettings(
    clients=ClientsConfig(total=3, quorum=0.6),
    local=LocalConfig(epochs=20, batch_size=32, lr=0.1),
    distill=DistillConfig(steps=200, eval_every=50),
    flower=FlowerConfig(evaluate_fraction=1.0),
)


@app.main()
def main(grid: Grid, context: Context) -> None:
    data = str(context.run_config["data"])
    clients = SETTINGS.clients.model_copy(update={"timeout": float(context.run_config["deadline"])})
    strategy = FedDF(
        ARCHITECTURES,
        SETTINGS.model_copy(update={"clients": clients}),
        pool=read(data, "pool")[0],
        validation=read(data, "validation"),
        test=read(data, "test"),
        folder=str(context.run_config["folder"]),
        wait=float(context.run_config["wait"]),
    )
    strategy.start(grid, num_rounds=int(context.run_config["rounds"]))
