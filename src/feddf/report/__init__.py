"""Tables and pictures from run folders. Reads files only, and never needs torch."""
