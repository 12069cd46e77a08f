"""The paper's tables and figures, one small file each: what is run, what the paper reports, and its claim as a check.

A verdict is computed from the measured numbers, never written by hand.
"""
