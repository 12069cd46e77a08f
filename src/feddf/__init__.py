"""feddf: one good model out of many, by ensemble distillation."""
