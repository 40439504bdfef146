"""Why prefixes break: a share of the calls compared with the earlier ones that they should have gone on from."""

from gateway.diagnosis.journal import Journal, Summary, read_summaries
from gateway.diagnosis.report import Finding, Report, report, report_json
from gateway.diagnosis.watcher import PrefixDiagnosis

__all__ = ["Finding", "Journal", "PrefixDiagnosis", "Report", "Summary", "read_summaries", "report", "report_json"]
