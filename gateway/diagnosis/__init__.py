"""Finds what breaks prefixes: compares a sample of the calls with the earlier calls that they should have continued.

`PrefixDiagnosis` runs in the gateway and writes a `CallSummary` per sampled call to the `DiagnosisJournal`. `report`
sums them up for `warmpath doctor` and the admin API, replays the calls under other policies (`replay.py`), and proposes
those that save tokens (`proposals.py`). It may import `prompts`, `prefix`, `policy`, `types` and `core`. Begin at
`breaks.py`, which finds where and why two prompts part.
"""

from gateway.diagnosis.journal import CallSummary, DiagnosisJournal, read_summaries
from gateway.diagnosis.prefix_diagnosis import PrefixDiagnosis
from gateway.diagnosis.proposals import Proposal
from gateway.diagnosis.report import DiagnosisReport, PrefixFinding, policy_line, report, report_json

__all__ = [
    "CallSummary",
    "DiagnosisJournal",
    "DiagnosisReport",
    "PrefixDiagnosis",
    "PrefixFinding",
    "Proposal",
    "policy_line",
    "read_summaries",
    "report",
    "report_json",
]
