"""What is found out about a machine."""
