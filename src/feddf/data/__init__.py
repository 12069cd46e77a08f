"""Data sets, their partition over clients, and the unlabeled pool."""
