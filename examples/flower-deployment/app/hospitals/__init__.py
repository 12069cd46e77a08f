"""Three sites with three architectures learn one task; their data stay where they are."""
