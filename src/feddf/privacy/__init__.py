"""Differential privacy: accounting, mechanisms, releases that are written down, and an audit that attacks them."""
