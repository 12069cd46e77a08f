"""A local page over run folders: served live (``feddf watch``), or written as one file (``feddf report --html``)."""
