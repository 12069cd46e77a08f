"""A Flower client, as in Flower's PyTorch tutorial."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits.task import Net, load_data, train

app = ClientApp()


@app.train()
def learn(message: Message, context: Context) -> Message:
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = load_data(int(context.node_config["partition-id"]))
    loss = train(model, images, labels)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(labels)})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
