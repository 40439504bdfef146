"""Settings: addresses, paths and secrets of a gateway. What is allowed and preferred is in the policy.

Each setting is an environment variable WARMPATH_<NAME>, and each can be overridden by the caller, which is how
command-line options work. This is the only module of the gateway that reads the environment; secrets that a policy
names are resolved here, too. Errors never repeat values, since some are secrets.
"""

from __future__ import annotations

import difflib
import math
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from gateway.core.api_keys import parse_key
from gateway.policy import Deployment, Finding, Policy, Secret

PREFIX = "WARMPATH_"
DEFAULT_PORT = 8080
ADMIN_KEY_CHARACTERS_MIN = 16
COMMAND_SECONDS = 10.0  # of a command that prints a secret

_HERE = Path(__file__).parent
_POLICY_FOLDERS = (_HERE / "_policies", _HERE.parent / "policies")  # in a wheel; in a checkout


class SettingsError(Exception):
    """Invalid settings, in the environment or in options. The message has one line per problem, with the variable."""


def _default_policy() -> Path:
    files = [folder / "default.yaml" for folder in _POLICY_FOLDERS]
    return next((file for file in files if file.exists()), files[-1])


def _default_for_service_link(value: Any) -> Any:
    """Replace a Kubernetes service link by the default port.

    Kubernetes sets WARMPATH_PORT=tcp://10.0.0.1:8080 in every pod of a namespace with a Service named warmpath. A value
    in the pod's manifest would override it, so the operator has set none.
    """
    return DEFAULT_PORT if isinstance(value, str) and value.startswith("tcp://") else value


def _none_for_service_link(value: Any) -> Any:
    """The same for a Service named warmpath-admin, where the default is no port."""
    return None if isinstance(value, str) and value.startswith("tcp://") else value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _expand_home(path: Path) -> Path:
    """Expand `~`. Shells do so themselves, but not in env files, in quotes after `=`, or in a URL."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: no such home directory") from error


def _headers(value: Any) -> Any:
    """Parse `a=1,b=2`, percent-encoded, the format of OTEL_EXPORTER_OTLP_HEADERS."""
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    if any(not equals or not name.strip() for name, equals, _ in pairs):
        raise ValueError("headers must have the form name=value,name=value")
    return tuple((unquote(name.strip()), unquote(content.strip())) for name, _, content in pairs)


class Settings(BaseSettings):
    """All settings of a gateway, immutable. Make them with `load_settings`, which reports errors in plain words."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, populate_by_name=True
    )

    host: str = Field("127.0.0.1", description="Address to listen on. 0.0.0.0: all addresses.")
    port: Annotated[int, BeforeValidator(_default_for_service_link)] = Field(
        DEFAULT_PORT, ge=0, le=65535, description="Port to listen on. 0: any free port."
    )
    policy: Path = Field(default_factory=_default_policy, description="Policy file.")
    data_dir: Path = Field(Path(".warmpath"), description="Folder for the files that the gateway writes.")
    storage: str = Field(
        "memory://",
        pattern="^[a-z+]+://",
        description="Storage of limits, cache, keys and stored responses: memory://, sqlite:///path/to/file, "
        "redis://host:6379/0, redis+cluster://host:6379,host:6379 or redis+sentinel://host:26379,host:26379/service.",
    )
    ledger_dir: Path = Field(
        default_factory=lambda data: data["data_dir"] / "ledger",
        description="Folder of the ledger. Default: DATA_DIR/ledger.",
    )
    ledger_keep_days: int | None = Field(
        None,
        ge=1,
        description="Days to keep ledger rows, which are deleted in whole segments of at most a day. Default: forever.",
    )
    ledger_compact: bool = Field(
        True,
        description="Whether closed segments are converted to Parquet in the background, after they were shipped.",
    )
    ledger_ship: str | None = Field(
        None,
        pattern=r"^(rediss?(\+cluster|\+sentinel)?|unix)://",
        repr=False,
        description="Redis URL to which ledger rows are shipped, for `warmpath usage collect`. Default: not shipped.",
    )
    replica: str = Field(
        default_factory=socket.gethostname,
        min_length=1,
        max_length=200,
        description="Name of this gateway in traces and the ledger, if there are several. Default: the host's name.",
    )
    key_pepper: SecretStr = Field(
        SecretStr(""),
        description="Secret in the hashes of API keys. A change invalidates them; see `warmpath keys change-pepper`.",
    )
    dev_key: SecretStr | None = Field(None, description="API key that `warmpath up` creates, wp-<id>-<secret>.")
    admin_port: Annotated[int | None, BeforeValidator(_none_for_service_link)] = Field(
        None, ge=0, le=65535, description="Port of the admin API, which has its own listener. Default: no admin API."
    )
    admin_host: str = Field("127.0.0.1", validate_default=True, description="Address to listen on for the admin API.")
    admin_key: SecretStr | None = Field(
        None,
        validate_default=True,
        min_length=ADMIN_KEY_CHARACTERS_MIN,
        description="Key for the admin API.",
    )
    max_body_bytes: ByteSize = Field(
        ByteSize(32 * 1024 * 1024),
        gt=0,
        description="Maximum request body, as in 1000000 or 64MiB. Longer ones get a 413.",
    )
    max_bodies_bytes: ByteSize = Field(
        ByteSize(256 * 1024 * 1024),
        gt=0,
        validate_default=True,
        description="Maximum bytes of all request bodies in a process. Further requests get a 503.",
    )
    reconcile_seconds: float = Field(
        3600.0,
        gt=0,
        allow_inf_nan=False,
        description="Interval between samples of the engines' token counters, for `warmpath usage reconcile`.",
    )
    max_file_bytes: ByteSize = Field(
        ByteSize(200 * 1024 * 1024), gt=0, description="Maximum batch input file, as in 1000000 or 64MiB."
    )
    lame_duck_seconds: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="After a stop signal, how long new calls are still accepted while /ready already fails. Set it to "
        "the time that load balancers need to notice.",
    )
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Worker processes of `warmpath serve` that share the port. More than 1 needs SQLite or Redis.",
    )
    drain_seconds: float = Field(
        30.0, ge=0, allow_inf_nan=False, description="How long a shutdown waits for calls in flight."
    )
    upstream_connect_seconds: float = Field(
        5.0, gt=0, allow_inf_nan=False, description="Timeout for connecting to a deployment."
    )
    native_relay: bool = Field(
        True,
        description="Whether native code relays the texts of streams, if it was compiled. If not, Python relays them, "
        "for more CPU time and with the same result.",
    )
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://",
        validation_alias=AliasChoices(f"{PREFIX}OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        description="Base URL of an OTLP/HTTP collector, as in http://127.0.0.1:4318. Default: no traces are sent.",
    )
    otlp_headers: Annotated[tuple[tuple[str, str], ...], NoDecode, BeforeValidator(_headers)] = Field(
        (),
        validation_alias=AliasChoices(f"{PREFIX}OTLP_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"),
        description="Headers for the collector, as in `api-key=secret,tenant=a` (percent-encoded).",
        repr=False,
    )
    otlp_metrics_seconds: float | None = Field(
        None,
        ge=1,
        allow_inf_nan=False,
        description="Interval in which metrics are sent to the collector, too. Default: metrics are only scraped.",
    )
    metrics_tenants: int = Field(
        20,
        ge=1,
        le=500,
        description="Tenants that have their own label in metrics: those that spend most. All others are `other`.",
    )
    trace_url: str | None = Field(
        None,
        pattern=r"^https?://\S+\{trace_id\}\S*$",
        description="URL of a trace's page, as in http://127.0.0.1:16686/trace/{trace_id}. The dashboard links to it.",
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = Field(
        "info", description="Log level: debug, info, warning or error."
    )

    @property
    def audit_dir(self) -> Path:
        """Folder of the audit log."""
        return self.data_dir / "audit"

    @field_validator("policy", "data_dir", "ledger_dir")
    @classmethod
    def _expand_home_in_paths(cls, value: Path) -> Path:
        return _expand_home(value)

    @field_validator("storage")
    @classmethod
    def _expand_home_in_sqlite_url(cls, value: str) -> str:
        scheme, _, file = value.partition(":///")
        return f"{scheme}:///{_expand_home(Path(file))}" if scheme == "sqlite" and file.startswith("~") else value

    @field_validator("otlp_metrics_seconds")
    @classmethod
    def _metrics_need_a_collector(cls, value: float | None, given: ValidationInfo) -> float | None:
        if value is not None and given.data.get("otlp_endpoint") is None:
            raise ValueError(f"needs {PREFIX}OTLP_ENDPOINT, to which metrics are sent")
        return value

    @field_validator("max_bodies_bytes")
    @classmethod
    def _one_body_must_fit(cls, value: ByteSize, given: ValidationInfo) -> ByteSize:
        if value < given.data.get("max_body_bytes", 0):
            raise ValueError(f"must be at least {PREFIX}MAX_BODY_BYTES")
        return value

    @field_validator("dev_key")
    @classmethod
    def _dev_key_must_be_a_key(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and parse_key(value.get_secret_value()) is None:
            raise ValueError("must have the form wp-<id>-<secret>, as in wp-dev-0123456789abcdef")
        return value

    @field_validator("admin_host")
    @classmethod
    def _admin_needs_its_own_address(cls, value: str, given: ValidationInfo) -> str:
        port = given.data.get("admin_port")
        if port and port == given.data.get("port") and value == given.data.get("host"):
            raise ValueError(f"{PREFIX}ADMIN_PORT equals {PREFIX}PORT; both cannot listen on the same address")
        return value

    @field_validator("admin_key")
    @classmethod
    def _admin_port_needs_a_key(cls, value: SecretStr | None, given: ValidationInfo) -> SecretStr | None:
        if value is None and given.data.get("admin_port") is not None:
            raise ValueError(f"must be set if {PREFIX}ADMIN_PORT is set")
        return value


class UpSettings(Settings):
    """Settings of `warmpath up`, which generates an admin key if none is set."""

    @field_validator("admin_key")
    @classmethod
    def _admin_port_needs_a_key(cls, value: SecretStr | None, given: ValidationInfo) -> SecretStr | None:
        return value


class ClientSettings(BaseSettings):
    """Settings of commands that are clients of a gateway. They read the same variables as OpenAI's clients."""

    model_config = SettingsConfigDict(env_ignore_empty=True, extra="forbid", frozen=True, populate_by_name=True)

    base_url: str = Field(
        f"http://127.0.0.1:{DEFAULT_PORT}/v1",
        pattern=r"^https?://",
        validation_alias="OPENAI_BASE_URL",
        description="The gateway's base URL, including /v1.",
    )
    api_key: SecretStr = Field(validation_alias="OPENAI_API_KEY", description="API key.")


def load_client_settings(**options: Any) -> ClientSettings:
    """Client settings from the environment. An option that is not None overrides it. Raises `SettingsError`."""
    try:
        return ClientSettings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        problems = [f"{detail['loc'][0]}: {detail['msg'].lower()}" for detail in error.errors(include_url=False)]
        raise SettingsError("\n".join(problems)) from None


def load_settings(form: type[Settings] = Settings, **options: Any) -> Settings:
    """Settings from the environment. An option that is not None overrides it. Raises `SettingsError`."""
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return form(**given)
    except ValidationError as error:
        raise SettingsError("\n".join(_messages(error))) from None


def variable(name: str) -> str:
    """The name of a setting's environment variable."""
    return PREFIX + name.upper()


def misspelled_variables() -> list[str]:
    """A warning for each environment variable whose name is similar to a setting's but unknown."""
    known = [variable(name) for name in Settings.model_fields]
    unknown = [name for name in os.environ if name.startswith(PREFIX) and name not in known]
    close = ((name, difflib.get_close_matches(name, known, n=1, cutoff=0.85)) for name in sorted(unknown))
    return [f"{name} is not a setting; did you mean {matches[0]}?" for name, matches in close if matches]


class SecretSources:
    """Reads the secrets that a policy names. A command's output is kept until it expires."""

    def __init__(self) -> None:
        self._printed: dict[Secret, tuple[str, float]] = {}  # by source: the output, and when it expires

    def resolve(self, secret: Secret) -> str:
        """The value of a secret. Raises `SettingsError` if there is none. A command runs `COMMAND_SECONDS` at most."""
        value = self._read(secret)
        if not value or not value.isprintable() or not value.isascii():
            problem = "is not set" if not value else "has something else than one line of ASCII characters"
            raise SettingsError(f"{secret.source}, named in the policy, {problem}")
        return value

    def _read(self, secret: Secret) -> str:
        if secret.env is not None:
            return os.environ.get(secret.env, "")
        try:
            if secret.file is not None:
                return Path(secret.file).read_text(encoding="utf-8").strip()
            return self._run(secret)
        except (OSError, UnicodeDecodeError, subprocess.SubprocessError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
            raise SettingsError(f"{secret.source}, named in the policy, cannot be read: {reason}") from None

    def _run(self, secret: Secret) -> str:
        kept, until = self._printed.get(secret, ("", 0.0))
        if kept and time.monotonic() < until:
            return kept
        done = subprocess.run(
            secret.command or (), capture_output=True, timeout=COMMAND_SECONDS, check=True, stdin=subprocess.DEVNULL
        )
        value = done.stdout.decode().strip()
        self._printed[secret] = value, time.monotonic() + (secret.expires or math.inf)
        return value


resolve_secret = SecretSources().resolve


def in_cluster_api() -> str | None:
    """The URL of the API server of the Kubernetes cluster in which this process runs; None outside of a cluster."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return (f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}") if host else None


def secrets_of(deployment: Deployment) -> Iterator[tuple[tuple[str, ...], Secret]]:
    """The secrets of a deployment, each with the path of its field."""
    if deployment.api_key is not None:
        yield ("api_key",), deployment.api_key
    for name, value in deployment.headers.items():
        if isinstance(value, Secret):
            yield ("headers", name), value
    if deployment.proxy is not None and deployment.proxy.login is not None:
        yield ("proxy", "login"), deployment.proxy.login


def missing_secrets(policy: Policy) -> Iterator[Finding]:
    """A `gateway.policy.Check`: reports secrets that the policy names and that cannot be read."""
    for i, deployment in enumerate(policy.deployments):
        for path, secret in secrets_of(deployment):
            try:
                resolve_secret(secret)
            except SettingsError as error:
                field = "env" if secret.env is not None else "file" if secret.file is not None else "command"
                yield ("deployments", i, *path, field), str(error).replace(", named in the policy,", "")
    for i, webhook in enumerate(policy.webhooks):
        try:
            resolve_secret(webhook.secret)
        except SettingsError as error:
            yield ("webhooks", i, "secret"), str(error).replace(", named in the policy,", "")
    if policy.sign_in is not None and policy.sign_in.client_secret is not None:
        try:
            resolve_secret(policy.sign_in.client_secret)
        except SettingsError as error:
            yield ("sign_in", "client_secret"), str(error).replace(", named in the policy,", "")


def _messages(error: ValidationError) -> Iterator[str]:
    """Messages for a validation error. They do not contain values, since some are secrets."""
    for detail in error.errors(include_url=False):
        if detail["type"] == "default_factory_not_called":  # a consequence of an error in another setting
            continue
        name = str(detail["loc"][0])  # the field, or its first alias
        field = Settings.model_fields.get(name)
        if detail["type"] == "value_error":
            message = str(detail["ctx"]["error"])
        else:
            message = detail["msg"].replace("Input should", "should").replace("String should", "should")
        hint = f" ({field.description})" if field else ""
        yield f"{variable(name) if field else _variables_of(name)}: {message}{hint}"


def _variables_of(alias: str) -> str:
    """All names of a setting's variable. Pydantic does not report which of them was set."""
    for field in Settings.model_fields.values():
        if isinstance(field.validation_alias, AliasChoices) and alias in field.validation_alias.choices:
            return " or ".join(map(str, field.validation_alias.choices))
    return alias


__all__ = [
    "ClientSettings",
    "Settings",
    "SettingsError",
    "UpSettings",
    "load_client_settings",
    "load_settings",
    "missing_secrets",
    "misspelled_variables",
    "resolve_secret",
    "secrets_of",
    "variable",
]
