"""Averages, ensembles, trust and guards that withstand hostile clients. It imports fusion, never the reverse."""
