"""Run folders to one self-contained page: `write_report([run], out)`. It reads files only and imports no other room."""

from kontrast.reports.report import write_report
from kontrast.reports.run_files import ReportError

__all__ = ["ReportError", "write_report"]
