"""Turn run folders into one self-contained HTML page. This room only reads files, and imports no other room."""

from kontrast.reports.report import report
from kontrast.reports.run_files import ReportError

__all__ = ["ReportError", "report"]
