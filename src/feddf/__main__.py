"""``python -m feddf`` is the same as ``feddf``."""

from feddf.cli import main

if __name__ == "__main__":
    main()
