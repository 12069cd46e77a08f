"""Long forms of tests, which ``make long-test`` runs: the same promises at real sizes, with the starts of real use."""

from __future__ import annotations

import os

import pytest

SOAK = os.environ.get("FEDDF_SOAK") == "1"
soak = pytest.mark.skipif(not SOAK, reason="a long form: set FEDDF_SOAK=1")
