"""From a configuration to a folder of results."""
