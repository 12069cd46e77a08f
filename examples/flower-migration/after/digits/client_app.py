"""A Flower client, as in Flower's PyTorch tutorial."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits.task import Net, load_data, train
from feddf.flower import announce

WIDTHS = {"small": 32, "large": 64}


def size(context: Context) -> str:
    return "large" if int(context.node_config["partition-id"]) % 2 else "small"


app = announce(ClientApp(), prototype=size)


@app.train()
def learn(message: Message, context: Context) -> Message:
    model = Net(WIDTHS[size(context)])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = load_data(int(context.node_config["partition-id"]))
    loss = train(model, images, labels)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(labels)})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
