"""The alert rules of deploy/prometheus, by Prometheus' own tool, and the documentation of each."""

from __future__ import annotations

import re
import subprocess

import yaml

from tests.prometheus import ROOT, RULES, alert_names, tool


def promtool(*arguments: str) -> str:
    ran = subprocess.run([tool("promtool"), *arguments], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_rules_pass_their_unit_tests() -> None:
    assert "SUCCESS" in promtool("check", "rules", str(RULES))
    assert "SUCCESS" in promtool("test", "rules", str(RULES.with_name("alerts_test.yml")))


def test_every_alert_has_a_unit_test_and_a_section_in_the_documentation() -> None:
    tests = yaml.safe_load(RULES.with_name("alerts_test.yml").read_text())["tests"]
    tested = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    page = (ROOT / "docs" / "how-to" / "alerts.md").read_text()
    assert tested == alert_names() == set(re.findall(r"^## (Warmpath\w+)$", page, re.MULTILINE))
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    for rule in rules:
        if name := rule.get("alert"):
            assert rule["annotations"]["runbook"] == f"docs/how-to/alerts.md#{name.lower()}"
            assert rule["labels"]["severity"] in ("critical", "warning", "info")
