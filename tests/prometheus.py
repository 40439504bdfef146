"""A real Prometheus for tests: scrapes quickly, and evaluates the alert rules with short times and low thresholds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from tests.e2e.processes import until

ROOT = Path(__file__).parents[1]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
INTERVAL = "250ms"
# What the tests replace in the rules. Each of these texts must occur in some expression.
SHORT = {
    "[6h] offset 15m": "[10s] offset 3s",
    "[15m]": "[3s]",
    "[5m]": "[4s]",
    "> 10000": "> 100",  # tokens
    "> 30": "> 0.3",  # seconds in the queue
    "> 300": "> 0.3",  # seconds until rows are shipped
}


def tool(name: str) -> str:
    """The path of `prometheus` or `promtool`. Skips the test if it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} is on the PATH: scripts/ensure-prometheus.sh installs it")
    return found


def short_rules() -> dict[str, Any]:
    """The alert rules without `for`, with short ranges and low thresholds."""
    rules: dict[str, Any] = yaml.safe_load(RULES.read_text())
    unused = set(SHORT)
    for group in rules["groups"]:
        group["interval"] = INTERVAL
        for rule in group["rules"]:
            rule.pop("for", None)
            for long, short in SHORT.items():
                pattern = re.escape(long) + r"(?!\d)"
                unused -= {long} if re.search(pattern, rule["expr"]) else set()
                rule["expr"] = re.sub(pattern, short, rule["expr"])
    assert not unused, unused
    return rules


def alert_names() -> set[str]:
    return {rule["alert"] for group in short_rules()["groups"] for rule in group["rules"] if "alert" in rule}


def panel_queries() -> dict[str, str]:
    """The queries of all panels of the Grafana dashboards, by dashboard, panel and letter, with all values chosen."""
    queries = {}
    for file in DASHBOARDS:
        dashboard = json.loads(file.read_text())
        variables = [variable["name"] for variable in dashboard["templating"]["list"]]
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                query = target["expr"].replace("$__rate_interval", "5s").replace("$__range", "1m")
                for name in variables:
                    query = re.sub(rf"\${name}\b", ".*", query)
                assert "$" not in query, query
                queries[f"{file.stem}: {panel['title']} {target['refId']}"] = re.sub(r"\[5m\]", "[5s]", query)
    return queries


class Prometheus:
    """A client of the running server's HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **query: str | float) -> Any:
        answer = httpx2.get(f"{self.url}/api/v1/{path}", params=query).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, query: str) -> list[tuple[Mapping[str, str], float]]:
        """The samples of an instant query with their labels, without those that are not a number."""
        found = [(each["metric"], float(each["value"][1])) for each in self.get("query", query=query)["result"]]
        return [(labels, value) for labels, value in found if value == value]

    def fired(self) -> set[str]:
        """The alerts that have fired since the start."""
        return {labels["alertname"] for labels, _ in self.values('last_over_time(ALERTS{alertstate="firing"}[10m])')}


@contextmanager
def prometheus(folder: Path, port: int, targets: Mapping[str, str]) -> Iterator[Prometheus]:
    """Run Prometheus. `targets` are host and port of each scrape job."""
    command = tool("prometheus")
    folder.mkdir(parents=True)
    (folder / "rules.yml").write_text(yaml.safe_dump(short_rules()))
    jobs = [{"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets.items()]
    config = {
        "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
        "rule_files": ["rules.yml"],
        "scrape_configs": jobs,
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    arguments = [
        f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage", "--log.level=warn",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([command, *arguments], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: _is_ready(url, process, folder / "log"))
        yield Prometheus(url)
    finally:
        process.kill()
        process.wait()


def _is_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        return httpx2.get(f"{url}/-/ready").status_code == 200
    except httpx2.TransportError:
        return False
