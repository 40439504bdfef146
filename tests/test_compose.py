"""docker-compose.yml and the files that it mounts, as far as they can be checked without a docker daemon."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.policy.file import load_policy
from gateway.settings import Settings
from gateway.telemetry import Telemetry, observable
from gateway.telemetry.observable import ObservableMetric

ROOT = Path(__file__).parents[1]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
DOCKERFILES = sorted((ROOT / "deploy").glob("*.Dockerfile"))
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*")
NO_SHELL = {"otel-collector"}  # its image has no shell for a health check


def bind_mounts() -> list[tuple[str, str, str]]:
    """(service, path on this machine, path in the container)."""
    return [
        (name, *volume.split(":")[:2])
        for name, service in SERVICES.items()
        for volume in service.get("volumes", [])
        if volume.startswith(".")
    ]


def test_docker_compose_accepts_the_file() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("there is no docker client with the compose plugin here")
    found = subprocess.run([docker, "compose", "config", "-q"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_the_services() -> None:
    assert set(SERVICES) == {"gateway", "engine", "redis", "otel-collector", "jaeger", "prometheus", "grafana"}


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_is_pinned(name: str) -> None:
    assert PINNED.fullmatch(SERVICES[name]["image"])


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_are_pinned_and_run_as_an_unprivileged_user(path: Path) -> None:
    lines = path.read_text().splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM")]
    stages = {line.split()[3] for line in lines if line.startswith("FROM") and " AS " in line}
    assert bases
    assert all(PINNED.fullmatch(base) for base in bases if base not in stages)
    assert "USER 10001" in lines, "a number, which Kubernetes can check to be not root"
    assert lines.index("USER 10001") > lines.index("COPY --from=build /opt/warmpath /opt/warmpath")
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    for line in lines:
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists() and f"!{source}" in sent, line


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_no_complaint(path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    found = subprocess.run([hadolint, path], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_gateway_s_image_has_no_engine() -> None:
    dockerfile = (ROOT / "deploy" / "gateway.Dockerfile").read_text()
    assert "COPY backend" not in dockerfile
    assert "[engine]" not in dockerfile


def test_only_the_user_facing_ports_are_published_and_only_on_loopback() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    here = [port.removeprefix("127.0.0.1:").partition(":")[0] for port in published if port.startswith("127.0.0.1:")]
    assert sorted(here) == ["16686", "3000", "8080", "8082"] and len(here) == len(published)


@pytest.mark.parametrize("name", sorted(set(SERVICES) - NO_SHELL))
def test_every_service_has_a_health_check(name: str) -> None:
    assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"


def test_dependencies_that_are_waited_for_have_health_checks() -> None:
    for service in SERVICES.values():
        for name, wait in service.get("depends_on", {}).items():
            assert wait["condition"] == ("service_started" if name in NO_SHELL else "service_healthy")


def test_every_mounted_file_exists_and_every_volume_is_declared() -> None:
    assert bind_mounts()
    for _, source, _ in bind_mounts():
        assert (ROOT / source).exists(), source
    named = [
        volume.split(":")[0]
        for service in SERVICES.values()
        for volume in service.get("volumes", [])
        if not volume.startswith(".")
    ]
    assert sorted(named) == sorted(COMPOSE["volumes"])


def interpolated(value: str, environment: dict[str, str]) -> str:
    """Substitutes variables as compose does, in the two forms used here: `${NAME:-default}` and `${NAME:+if set}`."""

    def meant(found: re.Match[str]) -> str:
        name, sign, other = found.groups()
        given = environment.get(name, "")
        return (other if given else "") if sign == "+" else (given or other)

    return re.sub(r"\$\{(\w+):([-+])([^}]*)\}", meant, value)


@pytest.mark.parametrize("key", ["", "a-key-of-sixteen-characters"])
def test_the_gateway_s_settings_are_valid_and_a_key_enables_the_dashboard(key: str) -> None:
    known = {f"WARMPATH_{name.upper()}" for name in Settings.model_fields}
    given = SERVICES["gateway"]["environment"]
    assert set(given) <= known
    values = {name: interpolated(value, {"WARMPATH_ADMIN_KEY": key}) for name, value in given.items()}
    fields = {name.removeprefix("WARMPATH_").lower(): value for name, value in values.items() if value}
    settings = Settings.model_validate(fields)  # an empty value in the environment counts as unset
    assert settings.admin_port == (8082 if key else None)
    assert settings.trace_url == f"http://{SERVICES['jaeger']['ports'][0].rpartition(':')[0]}/trace/{{trace_id}}"


def test_the_policy_is_valid_and_has_the_engine_s_network_name() -> None:
    inside = SERVICES["gateway"]["environment"]["WARMPATH_POLICY"]
    ((_, source, target),) = [mount for mount in bind_mounts() if mount[0] == "gateway"]
    policy = load_policy(ROOT / source / Path(inside).relative_to(target))
    assert [deployment.base_url for deployment in policy.deployments] == ["http://engine:8000/v1"]
    assert '"--port", "8000"' in (ROOT / "deploy" / "engine.Dockerfile").read_text()


def test_prometheus_scrapes_existing_services() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    targets = [
        target for job in config["scrape_configs"] for group in job["static_configs"] for target in group["targets"]
    ]
    assert sorted(targets) == ["engine:8000", "gateway:8080", "otel-collector:8888"]


def test_the_collector_s_pipelines_use_existing_components() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "otel-collector.yaml").read_text())
    for pipeline in config["service"]["pipelines"].values():
        for kind, parts in pipeline.items():
            assert set(parts) <= set(config[kind])
    assert set(config["service"]["extensions"]) <= set(config["extensions"])
    host, _, port = config["exporters"]["otlp/jaeger"]["endpoint"].partition(":")
    assert (host in SERVICES, port) == (True, "4317")


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_the_grafana_panels_use_existing_metrics_and_do_not_overlap(file: Path) -> None:
    folder = ROOT / "deploy" / "grafana"
    sources = yaml.safe_load((folder / "provisioning" / "datasources" / "warmpath.yaml").read_text())["datasources"]
    dashboard = json.loads(file.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    queries += [variable["query"]["query"] for variable in dashboard["templating"]["list"]]
    used = {name for query in queries for name in re.findall(r"\b((?:warmpath_|gen_ai_client_|vllm:)\w+)", query)}
    assert used and used <= gateway_metrics() | engine_metrics()
    uids = {source["uid"] for source in sources}
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        assert all(target["datasource"]["uid"] in uids for target in panel.get("targets", []))
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        taken |= cells


def test_the_alert_rules_use_existing_metrics() -> None:
    used = set(re.findall(r"\b(warmpath_\w+)", (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()))
    assert used and used <= gateway_metrics()


def gateway_metrics() -> set[str]:
    telemetry = Telemetry()
    for metric in vars(observable).values():
        if isinstance(metric, ObservableMetric):
            with contextlib.suppress(ValueError):  # those of telemetry itself
                telemetry.register(metric, dict)
    return exposed(re.findall(r"^# TYPE (\S+) (\w+)", telemetry.render_metrics()[0].decode(), re.MULTILINE))


def engine_metrics() -> set[str]:
    """Read from the source, since tests of the gateway do not import the engine."""
    source = "".join((ROOT / "backend" / "server" / name).read_text() for name in ("metrics.py", "engine_metrics.py"))
    names = re.findall(r'"(vllm:\w+)"', source)
    return {name + suffix for name in names for suffix in ("", "_total", "_bucket")}


def exposed(families: list[tuple[str, str]]) -> set[str]:
    return {
        name + suffix
        for name, kind in families
        for suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
    }
