"""Pretrained transformers for classification of texts (the paper fine-tunes DistilBERT). Needs the extra ``text``."""

from __future__ import annotations

from torch import Tensor, nn

from feddf.runtime.packages import transformers


class Transformer(nn.Module):
    """Any ``AutoModelForSequenceClassification``, from a local folder or by its name on a hub.

    Its inputs are rows of token numbers; those equal to the model's padding token are masked. The head is new, and its
    weights are drawn when the model is built. ``pretrained=False`` draws all weights, for tests and ablations.
    """

    def __init__(self, shape: tuple[int, ...], n_classes: int, *, path: str, pretrained: bool = True) -> None:
        super().__init__()
        library = transformers()
        config = library.AutoConfig.from_pretrained(path, num_labels=n_classes, trust_remote_code=False)
        automatic = library.AutoModelForSequenceClassification
        own_head = {"config": config, "ignore_mismatched_sizes": True}  # the file's head has other classes
        if pretrained:
            network = automatic.from_pretrained(path, **own_head, trust_remote_code=False)
        else:
            network = automatic.from_config(config, trust_remote_code=False)
        if shape[0] > config.max_position_embeddings:
            raise ValueError(f"{shape[0]} tokens are more than the {config.max_position_embeddings} that it can read")
        self.network: nn.Module = network
        self.padding = int(config.pad_token_id or 0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of N×L token numbers."""
        logits: Tensor = self.network(input_ids=tokens, attention_mask=(tokens != self.padding).long()).logits
        return logits
