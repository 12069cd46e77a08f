"""Tables and pictures from run folders. Reads files only, and never needs torch."""

from __future__ import annotations

from feddf.report.read import ReportError, Run, alike, find_runs, read_run

__all__ = ["ReportError", "Run", "alike", "find_runs", "read_run"]
