"""Run folders to one self-contained page: `write_report([run], out)`. It reads files only and imports no other room."""

from kontrast.reports.folder import ReportError
from kontrast.reports.page import write_report

__all__ = ["ReportError", "write_report"]
