"""Print the table of defaults that names of kept runs leave out (reproduction/defaults.json), as of today.

    python tools/freeze_defaults.py > reproduction/defaults.json

Made anew only together with tools/rename_cells.py, since all kept runs get other names by it.
"""

from __future__ import annotations

import json

from pydantic_core import PydanticUndefined

from feddf.config.keys import all_keys

if __name__ == "__main__":
    known = {name: key.default for name, key in sorted(all_keys().items()) if key.default is not PydanticUndefined}
    print(json.dumps(known, indent=1, default=list))
