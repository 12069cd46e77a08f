"""A Flower server that distills: clients of two sizes teach each other through unlabeled images."""

from functools import partial

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from digits.client_app import WIDTHS
from digits.task import CLIENTS, Net, load_test
from feddf import ClientsConfig, DistillConfig
from feddf.flower import FedDF, FlowerSettings

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    images, labels = load_test()
    strategy = FedDF(
        {name: partial(Net, width) for name, width in WIDTHS.items()},
        FlowerSettings(clients=ClientsConfig(total=CLIENTS), distill=DistillConfig(steps=300, eval_every=50)),
        pool=images[:200],
        validation=(images[200:300], labels[200:300]),
        test=(images[300:], labels[300:]),
        folder=str(context.run_config["folder"]),
    )
    strategy.start(grid, num_rounds=int(context.run_config["rounds"]))
