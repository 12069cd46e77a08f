"""One-shot fusion: FedDF with one round and no clients, for models that people already have."""
