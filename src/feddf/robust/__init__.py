"""Averages, ensembles, trust and guards that stand hostile clients. It imports fusion, never the reverse."""
