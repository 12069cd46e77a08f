"""Where and how fast the work is done, never what it is: threads, memory, compilation, safe files."""
