"""Architectures. A model is any ``nn.Module`` from encoded inputs to logits.

Each is built as ``model(shape, n_classes, **options)``, where ``shape`` is that of one encoded input. To give one a
name, add a line to :data:`feddf.config.names.MODELS`.
"""
