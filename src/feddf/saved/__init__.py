"""Models that can be used without the experiment that made them: weights, architecture, classes and preprocessing."""
