"""The Helm chart, by Helm's own engine: linted, rendered, and checked against Kubernetes' schemas and our settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from gateway.policy.file import parse_policy
from gateway.settings import Settings
from scripts.manifests import CHART, EXAMPLES, MANIFESTS, manifests, rendered

ROOT = Path(__file__).parents[2]
VERSIONS = ("1.30", "1.37")  # the oldest that the chart accepts, and the newest whose schemas are installed
WARNING = 2  # a severity of `helm lint`
CUSTOM_KINDS = {"ServiceMonitor", "PrometheusRule", "ScaledObject"}  # whose schemas are not Kubernetes' own
Manifest = dict[str, Any]

# Values that a chart of any use must accept, beside the examples.
COMBINATIONS: dict[str, dict[str, Any]] = {
    **{path.stem: yaml.safe_load((ROOT / path).read_text()) for path in sorted((ROOT / EXAMPLES).glob("*.yaml"))},
    "smallest": {"secret": {"storage": "rediss://redis:6380/0"}, "discovery": {"enabled": False}},
    "engine": {"secret": {"existingSecret": "s"}, "engine": {"enabled": True, "args": ["--max-model-len=4k"]}},
    "placed": {
        "secret": {"existingSecret": "s"}, "existingConfigMap": "own", "fullnameOverride": "w",
        "serviceAccount": {"name": "sa"}, "imagePullSecrets": [{"name": "pull"}],
        "gateway": {
            "image": {"repository": "r.example/gateway", "digest": "sha256:" + "0" * 64},
            "nodeSelector": {"a": "b"}, "tolerations": [{"key": "a", "operator": "Exists"}],
            "env": [{"name": "A", "value": "1"}],
            "podAnnotations": {"a": "b"}, "podLabels": {"c": "d"}, "priorityClassName": "high",
            "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
            "volumeMounts": [{"name": "ca", "mountPath": "/ca"}],
            "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
        },
        "networkPolicy": {"enabled": True, "egress": [{"ports": [{"port": 443}]}]},
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def objects(values: dict[str, Any]) -> list[Manifest]:
    texts = [text for name, text in rendered(values).items() if name.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def of_kind(found: list[Manifest], *kinds: str) -> list[Manifest]:
    return [each for each in found if each["kind"] in kinds]


def pods(found: list[Manifest]) -> Iterator[tuple[Manifest, Manifest, Manifest]]:
    """(workload, pod spec, container)."""
    for workload in of_kind(found, "Deployment", "StatefulSet"):
        spec = workload["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        yield workload, spec, container


@pytest.mark.parametrize("values", COMBINATIONS.values(), ids=COMBINATIONS)
def test_helm_lints_the_chart(values: dict[str, Any]) -> None:
    report = helm_python.lint(CHART, values, strict=True)
    assert not report["errors"]
    assert [message for message in report["messages"] if message["severity"] >= WARNING] == []


@pytest.mark.parametrize("values", COMBINATIONS.values(), ids=COMBINATIONS)
def test_every_object_is_valid_for_kubernetes(values: dict[str, Any]) -> None:
    found = objects(values)
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in found]
    assert len(set(names)) == len(names)
    for each in found:
        if each["kind"] not in CUSTOM_KINDS:
            for version in VERSIONS:
                kubernetes_validate.validate(each, version, strict=True)


def test_the_plain_manifests_are_the_rendered_chart() -> None:
    assert {path.name: path.read_text() for path in MANIFESTS.glob("*")} == manifests(), "run `make manifests`"


@pytest.mark.parametrize("values", COMBINATIONS.values(), ids=COMBINATIONS)
def test_selectors_ports_and_references_lead_somewhere(values: dict[str, Any]) -> None:
    found = objects(values)
    workloads = [(workload, container) for workload, _, container in pods(found)]
    for workload, _ in workloads:
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for service in of_kind(found, "Service"):
        (container,) = [
            container
            for workload, container in workloads
            if service["spec"]["selector"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()
        ]
        ports = {port["name"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for _, container in workloads:
        ports = {port["name"] for port in container["ports"]}
        assert {
            container[probe]["httpGet"]["port"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")
        } <= ports
    services = {each["metadata"]["name"] for each in of_kind(found, "Service")}
    for workload in of_kind(found, "StatefulSet"):
        assert workload["spec"]["serviceName"] in services
    targets = {(workload["kind"], workload["metadata"]["name"]) for workload, _ in workloads}
    for scaler in of_kind(found, "HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in targets
        (scaled,) = [one for one, _ in workloads if one["metadata"]["name"] == target["name"]]
        assert "replicas" not in scaled["spec"], "an upgrade would reset what the autoscaler has set"


@pytest.mark.parametrize("values", COMBINATIONS.values(), ids=COMBINATIONS)
def test_pods_are_confined_and_have_time_to_drain(values: dict[str, Any]) -> None:
    for _, spec, container in pods(objects(values)):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 10001
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert {"/tmp", "/var/lib/warmpath"} <= writable
        pre_stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        environment = {each["name"]: each.get("value") for each in container.get("env", ())}
        drains = [int(arg.partition("=")[2]) for arg in container.get("args", ()) if arg.startswith("--drain-seconds")]
        drain = drains[0] if drains else int(environment["WARMPATH_DRAIN_SECONDS"])
        assert spec["terminationGracePeriodSeconds"] >= pre_stop + drain + 10


@pytest.mark.parametrize("values", COMBINATIONS.values(), ids=COMBINATIONS)
def test_the_gateway_s_settings_and_policy_are_valid(values: dict[str, Any]) -> None:
    found = objects(values)
    (container,) = [container for _, _, container in pods(found) if container["name"] == "gateway"]
    secrets = of_kind(found, "Secret")
    given = {"WARMPATH_STORAGE": "redis://redis/0", "WARMPATH_ADMIN_KEY": "0123456789abcdef"}
    given |= secrets[0]["stringData"] if secrets else {}
    for each in container["env"]:
        source = each.get("valueFrom", {})
        key = source.get("secretKeyRef", {}).get("key")
        given[each["name"]] = each["value"] if "value" in each else given[key] if key else "pod-1"
    ours = {name: value for name, value in given.items() if name.startswith("WARMPATH_")}
    if "WARMPATH_ADMIN_PORT" not in ours:
        ours.pop("WARMPATH_ADMIN_KEY", None)
    settings = Settings.model_validate({name.removeprefix("WARMPATH_").lower(): value for name, value in ours.items()})
    assert settings.replica == "pod-1"
    is_deployment = any(workload["kind"] == "Deployment" for workload, _, _ in pods(found))
    assert is_deployment == (settings.ledger_ship is not None), "a ledger on a pod's own disk must be shipped"
    for config in of_kind(found, "ConfigMap"):
        policy = parse_policy(config["data"]["policy.yaml"].encode(), file="policy.yaml")
        readable = {role["metadata"]["namespace"] for role in of_kind(found, "Role")}
        own = of_kind(found, "ServiceAccount")[0]["metadata"]["namespace"]
        for deployment in policy.deployments if readable else ():
            assert deployment.source is not None and deployment.source.kubernetes is not None
            assert (deployment.source.kubernetes.namespace or own) in readable
            if any(workload["metadata"]["name"].endswith("-engine") for workload, _, _ in pods(found)):
                services = {service["metadata"]["name"] for service in of_kind(found, "Service")}
                assert deployment.source.kubernetes.service in services


def test_the_monitors_match_the_alerts() -> None:
    found = objects(COMBINATIONS["everything"])
    (rule,) = of_kind(found, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    (monitor,) = of_kind(found, "ServiceMonitor")
    label, spec = monitor["spec"]["jobLabel"], monitor["spec"]["selector"]
    (expression,) = spec["matchExpressions"]
    jobs = {
        service["metadata"]["labels"][label]
        for service in of_kind(found, "Service")
        if spec["matchLabels"].items() <= service["metadata"]["labels"].items()
        and service["metadata"]["labels"].get(expression["key"]) in expression["values"]
    }
    assert jobs == {"gateway", "engine"}
    assert set(re.findall(r'job="(\w+)"', str(rule["spec"]))) <= jobs


def test_wrong_values_are_refused_with_a_reason() -> None:
    base = {"secret": {"existingSecret": "s"}}
    wrong: list[tuple[dict[str, object], str]] = [
        ({}, "set secret.storage to a Redis URL"),
        ({"secret": {"storage": "sqlite:///x"}}, "secret.*storage"),
        ({**base, "gates": {}}, "gates"),
        ({**base, "gateway": {"replicas": -1}}, "replicas"),
        ({**base, "ledger": {"mode": "disk"}}, "mode"),
        ({**base, "gateway": {"autoscaling": {"enabled": True, "inflight": 0}}}, "needs inflight or cpuPercent"),
        ({"secret": {"storage": "redis://r"}, "admin": {"enabled": True}}, "admin.enabled needs secret.adminKey"),
    ]
    for values, reason in wrong:
        with pytest.raises(helm_python.HelmError, match=f"(?s){reason}"):
            rendered(values)


def test_a_changed_secret_restarts_the_pods_and_a_changed_policy_does_not() -> None:
    def template(**values: Any) -> Any:
        (gateway,) = of_kind(objects({"secret": {"storage": "redis://a"}, **values}), "Deployment")
        return gateway["spec"]["template"]

    assert template() != template(secret={"storage": "redis://b"})
    assert template() == template(policy="deployments: []")
