"""The paper's tables and figures, one file each, and comparisons made of several runs."""
