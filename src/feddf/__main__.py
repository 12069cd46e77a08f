"""``python -m feddf`` is the same as ``feddf``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    if sys.path and sys.path[0] in ("", str(Path.cwd())) and not sys.flags.safe_path:
        del sys.path[0]  # what lies in the working folder must not stand in for an installed package
    from feddf.cli import main

    main()
