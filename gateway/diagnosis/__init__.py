"""Why prefixes break: a share of the calls compared with the earlier ones that they should have gone on from."""

from gateway.diagnosis.journal import CallSummary, DiagnosisJournal, read_summaries
from gateway.diagnosis.prefix_diagnosis import PrefixDiagnosis
from gateway.diagnosis.report import DiagnosisReport, Finding, report, report_json

__all__ = [
    "CallSummary",
    "DiagnosisJournal",
    "DiagnosisReport",
    "Finding",
    "PrefixDiagnosis",
    "read_summaries",
    "report",
    "report_json",
]
