import ast
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import gateway
from gateway.policy import Secret
from gateway.policy.file import PolicyError, parse_policy
from gateway.server.policy_checks import IN_SERVICE
from gateway.settings import Settings, SettingsError, load_settings, misspelled_variables, resolve_secret, variable


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("WARMPATH_", "OTEL_")):
            monkeypatch.delenv(name)


def test_defaults_are_safe_on_a_laptop() -> None:
    settings = load_settings()
    assert (settings.host, settings.port, settings.storage) == ("127.0.0.1", 8080, "memory://")
    assert settings.max_body_bytes == 32 * 1024 * 1024
    assert settings.replica == socket.gethostname()
    assert settings.ledger_dir == Path(".warmpath/ledger")
    assert settings.policy.name == "default.yaml"
    assert settings.policy.exists()
    assert settings.dev_key is None


def test_variables_override_defaults_and_options_override_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMPATH_PORT", "9000")
    monkeypatch.setenv("WARMPATH_DATA_DIR", "/var/lib/warmpath")
    monkeypatch.setenv("WARMPATH_MAX_BODY_BYTES", "64MiB")
    monkeypatch.setenv("WARMPATH_LOG_LEVEL", "WARNING")
    monkeypatch.setenv("WARMPATH_HOST", "")  # as `${HOST:-}` in a compose file leaves it
    settings = load_settings(host=None)
    assert (settings.port, settings.host, settings.log_level) == (9000, "127.0.0.1", "warning")
    assert settings.ledger_dir == Path("/var/lib/warmpath/ledger")
    assert settings.max_body_bytes == 64 * 1024 * 1024
    assert load_settings(port=9001).port == 9001


def test_opentelemetry_s_variable_is_read_and_ours_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert load_settings().otlp_endpoint == "http://collector:4318"
    monkeypatch.setenv("WARMPATH_OTLP_ENDPOINT", "http://other:4318")
    assert load_settings().otlp_endpoint == "http://other:4318"
    assert load_settings(otlp_endpoint="http://third:4318").otlp_endpoint == "http://third:4318"


def test_a_kubernetes_service_link_is_not_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMPATH_PORT", "tcp://10.0.0.1:8080")
    assert load_settings().port == 8080


def test_a_tilde_expands_to_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/w")
    monkeypatch.setenv("WARMPATH_DATA_DIR", "~/data")
    monkeypatch.setenv("WARMPATH_STORAGE", "sqlite:///~/w.db")
    settings = load_settings(policy=Path("~/policy.yaml"))
    assert (str(settings.data_dir), str(settings.ledger_dir)) == ("/home/w/data", "/home/w/data/ledger")
    assert (settings.storage, str(settings.policy)) == ("sqlite:////home/w/w.db", "/home/w/policy.yaml")


def test_the_admin_api_needs_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMPATH_ADMIN_KEY", "k" * 16)
    monkeypatch.setenv("WARMPATH_ADMIN_PORT", "8080")
    with pytest.raises(SettingsError, match="WARMPATH_ADMIN_PORT equals WARMPATH_PORT"):
        load_settings()
    assert load_settings(port=8081).admin_port == load_settings(admin_host="10.0.0.1").admin_port == 8080


@pytest.mark.parametrize(
    "url", ["http://jaeger/trace/", "jaeger/{trace_id}", "javascript:alert('{trace_id}')", "http://a b/{trace_id}"]
)
def test_a_trace_url_contains_the_trace_id(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("WARMPATH_TRACE_URL", 'https://grafana/explore?left={"q":"{trace_id}"}')
    assert load_settings().trace_url
    monkeypatch.setenv("WARMPATH_TRACE_URL", url)
    with pytest.raises(SettingsError, match=r"WARMPATH_TRACE_URL: .*as in http://127.0.0.1:16686/trace/\{trace_id\}"):
        load_settings()


def test_every_invalid_value_is_reported_with_its_variable_and_without_the_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = {
        "WARMPATH_PORT": "http",
        "WARMPATH_STORAGE": "dsn-with-password",
        "WARMPATH_DEV_KEY": "sk-topsecret",
        "WARMPATH_MAX_BODY_BYTES": "much",
        "WARMPATH_DRAIN_SECONDS": "-1",
        "WARMPATH_LOG_LEVEL": "loud",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318",
    }
    for name, value in bad.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    lines = str(caught.value).splitlines()
    assert len(lines) == len(bad)
    for name in bad:
        assert any(name in line.partition(":")[0] for line in lines), name
    assert "topsecret" not in str(caught.value)
    assert "password" not in str(caught.value)


def test_secrets_are_not_in_the_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMPATH_KEY_PEPPER", "topsecret")
    monkeypatch.setenv("WARMPATH_DEV_KEY", "wp-dev-topsecret")
    settings = load_settings()
    assert "topsecret" not in repr(settings)
    assert settings.key_pepper.get_secret_value() == "topsecret"


def test_a_misspelled_variable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMPATH_POLICE", "p.yaml")
    monkeypatch.setenv("WARMPATH_SERVICE_HOST", "10.0.0.1")  # Kubernetes again
    monkeypatch.setenv("WARMPATH_PORT_8080_TCP_ADDR", "10.0.0.1")
    assert misspelled_variables() == ["WARMPATH_POLICE is not a setting; did you mean WARMPATH_POLICY?"]


def test_every_setting_has_a_description() -> None:
    assert 10 <= len(Settings.model_fields) <= 40
    for name, field in Settings.model_fields.items():
        assert field.description, variable(name)


def test_a_policy_s_secret_is_resolved_or_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "value")
    assert resolve_secret(Secret(env="SOME_KEY")) == "value"
    monkeypatch.setenv("SOME_KEY", "")
    with pytest.raises(SettingsError, match="SOME_KEY"):
        resolve_secret(Secret(env="SOME_KEY"))


def test_a_policy_in_service_needs_secrets_and_known_providers() -> None:
    text = b"""\
deployments:
  - {name: a, base_url: "http://a/v1", model: m, provider: vlm,
     api_key: {env: SURELY_NOT_SET}}
models: [{name: m, deployments: [a]}]
tenants: [{name: t}]
"""
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, file="p.yaml", checks=IN_SERVICE)
    provider, secret = map(str, caught.value.problems)
    assert provider.startswith("p.yaml:2:50: deployments.0.provider: there is no provider 'vlm'")
    assert provider.endswith("did you mean 'vllm'?")
    assert secret == (
        "p.yaml:3:16: deployments.0.api_key.env: the environment variable SURELY_NOT_SET is not set"
    )  # fmt: skip


def readers_of_the_environment(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv", "putenv"}:
            yield f"line {node.lineno}: {node.attr}"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names} & {"environ", "environb", "getenv", "putenv"}
            yield from (f"line {node.lineno}: {name}" for name in names)


def test_only_the_settings_read_the_environment() -> None:
    root = Path(gateway.__file__).parent
    found = {
        str(path.relative_to(root)): lines
        for path in root.rglob("*.py")
        if (lines := list(readers_of_the_environment(path.read_text())))
    }
    assert list(found) == ["settings.py"], found
