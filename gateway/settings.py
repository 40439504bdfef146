"""Settings: where things are, and secrets. What is allowed and preferred stands in the policy.

All of them are environment variables WARMPATH_<NAME>, and this is the only module of the gateway that reads the
environment. Command-line options win over them.
"""

from __future__ import annotations

import difflib
import os
import socket
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
from gateway.policy import EnvSecret, Finding, Policy

PREFIX = "WARMPATH_"
DEFAULT_PORT = 8080
ADMIN_KEY_CHARACTERS_MIN = 16

_HERE = Path(__file__).parent
_POLICY_FOLDERS = (_HERE / "_policies", _HERE.parent / "policies")  # in a wheel; in a checkout


class SettingsError(Exception):
    """The environment, or an option that stands for it, can not be used. One line per problem, naming the variable."""


def _default_policy() -> Path:
    files = [folder / "default.yaml" for folder in _POLICY_FOLDERS]
    return next((file for file in files if file.exists()), files[-1])


def _not_a_service_link(value: Any) -> Any:
    """Kubernetes sets WARMPATH_PORT=tcp://10.0.0.1:8080 in every pod beside a Service named warmpath.

    A value in the pod's own manifest would have won over it, so there is none.
    """
    return DEFAULT_PORT if isinstance(value, str) and value.startswith("tcp://") else value


def _no_service_link(value: Any) -> Any:
    """The same, beside a Service named warmpath-admin."""
    return None if isinstance(value, str) and value.startswith("tcp://") else value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _at_home(path: Path) -> Path:
    """Shells know `~`; files of variables, and shells behind a `=` in quotes or a URL, do not."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: there is no such home folder") from error


def _headers(value: Any) -> Any:
    """`a=1,b=2`, percent-encoded, as OpenTelemetry's environment variable has it."""
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    if any(not equals or not name.strip() for name, equals, _ in pairs):
        raise ValueError("headers are given as name=value,name=value")
    return tuple((unquote(name.strip()), unquote(content.strip())) for name, _, content in pairs)


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, populate_by_name=True
    )

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all.")
    port: Annotated[int, BeforeValidator(_not_a_service_link)] = Field(
        DEFAULT_PORT, ge=0, le=65535, description="Port to listen on; 0 takes any free one."
    )
    policy: Path = Field(default_factory=_default_policy, description="The policy file.")
    data_dir: Path = Field(Path(".warmpath"), description="Where the gateway keeps what it writes.")
    storage: str = Field(
        "memory://",
        pattern="^[a-z]+://",
        description="Limits, cache, keys and kept responses: memory://, sqlite:///path/to/file, redis://host:6379/0.",
    )
    ledger_dir: Path = Field(
        default_factory=lambda data: data["data_dir"] / "ledger", description="The ledger's folder; DATA_DIR/ledger."
    )
    ledger_keep_days: int | None = Field(
        None, ge=1, description="How long rows are kept, by whole segments of at most a day; left out: for ever."
    )
    ledger_compact: bool = Field(
        True,
        description="Whether closed segments become Parquet beside the gateway's work, after they are shipped.",
    )
    ledger_ship: str | None = Field(
        None,
        pattern="^(redis|rediss|unix)://",
        repr=False,
        description="A Redis to whose streams rows are sent, for `warmpath usage collect`; left out: none.",
    )
    replica: str = Field(
        default_factory=socket.gethostname,
        min_length=1,
        max_length=200,
        description="This gateway among several, in metrics and the ledger; the host's name.",
    )
    key_pepper: SecretStr = Field(
        SecretStr(""),
        description="Mixed into the hashes of keys; changing it voids them, see `warmpath keys change-pepper`.",
    )
    dev_key: SecretStr | None = Field(None, description="The key that `warmpath up` gives, wp-<id>-<secret>.")
    admin_port: Annotated[int | None, BeforeValidator(_no_service_link)] = Field(
        None, ge=0, le=65535, description="Port of the admin API, on a listener of its own; without one, there is none."
    )
    admin_host: str = Field("127.0.0.1", validate_default=True, description="Address on which the admin API listens.")
    admin_key: SecretStr | None = Field(
        None,
        validate_default=True,
        min_length=ADMIN_KEY_CHARACTERS_MIN,
        description="The key that the admin API asks for.",
    )
    max_body_bytes: ByteSize = Field(
        ByteSize(32 * 1024 * 1024), gt=0, description="Longer requests are refused; 1000000, 64MiB."
    )
    max_bodies_bytes: ByteSize = Field(
        ByteSize(256 * 1024 * 1024),
        gt=0,
        validate_default=True,
        description="Bytes of all requests that a process holds at the same time; beyond it they are refused with 503.",
    )
    reconcile_seconds: float = Field(
        3600.0,
        gt=0,
        allow_inf_nan=False,
        description="How often the engines' own counters are noted beside the ledger, for `warmpath usage reconcile`.",
    )
    max_file_bytes: ByteSize = Field(
        ByteSize(200 * 1024 * 1024), gt=0, description="Longer files for batches are refused; 1000000, 64MiB."
    )
    lame_duck_seconds: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="How long calls are still taken after a signal to stop, while /ready says no: as long as load "
        "balancers take to notice.",
    )
    workers: int = Field(
        1, ge=1, le=64, description="Processes of `warmpath serve` that share the port; the storage is then no memory."
    )
    drain_seconds: float = Field(
        30.0, ge=0, allow_inf_nan=False, description="How long calls in flight may take to end on shutdown."
    )
    upstream_connect_seconds: float = Field(
        5.0, gt=0, allow_inf_nan=False, description="How long connecting to a deployment may take."
    )
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://",
        validation_alias=AliasChoices(f"{PREFIX}OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        description="Base URL of an OTLP/HTTP collector, as in http://127.0.0.1:4318; without one, nothing is sent.",
    )
    otlp_headers: Annotated[tuple[tuple[str, str], ...], NoDecode, BeforeValidator(_headers)] = Field(
        (),
        validation_alias=AliasChoices(f"{PREFIX}OTLP_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"),
        description="Headers for the collector, as in `api-key=secret,tenant=a` (percent-encoded).",
        repr=False,
    )
    trace_url: str | None = Field(
        None,
        pattern=r"^https?://\S+\{trace_id\}\S*$",
        description="Where a person looks at one trace, as in http://127.0.0.1:16686/trace/{trace_id}; the dashboard "
        "links there.",
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = Field(
        "info", description="debug, info, warning or error."
    )

    @field_validator("policy", "data_dir", "ledger_dir")
    @classmethod
    def _home_is_not_a_folder_called_tilde(cls, value: Path) -> Path:
        return _at_home(value)

    @field_validator("storage")
    @classmethod
    def _nor_is_it_for_sqlite(cls, value: str) -> str:
        scheme, _, file = value.partition(":///")
        return f"{scheme}:///{_at_home(Path(file))}" if scheme == "sqlite" and file.startswith("~") else value

    @field_validator("max_bodies_bytes")
    @classmethod
    def _one_body_fits(cls, value: ByteSize, given: ValidationInfo) -> ByteSize:
        if value < given.data.get("max_body_bytes", 0):
            raise ValueError(f"must not be less than {PREFIX}MAX_BODY_BYTES")
        return value

    @field_validator("dev_key")
    @classmethod
    def _dev_key_is_a_key(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and parse_key(value.get_secret_value()) is None:
            raise ValueError("a key has the form wp-<id>-<secret>, as in wp-dev-0123456789abcdef")
        return value

    @field_validator("admin_host")
    @classmethod
    def _admin_listens_elsewhere(cls, value: str, given: ValidationInfo) -> str:
        port = given.data.get("admin_port")
        if port and port == given.data.get("port") and value == given.data.get("host"):
            raise ValueError(f"{PREFIX}ADMIN_PORT is {PREFIX}PORT: both would listen at the same place")
        return value

    @field_validator("admin_key")
    @classmethod
    def _admin_port_needs_a_key(cls, value: SecretStr | None, given: ValidationInfo) -> SecretStr | None:
        if value is None and given.data.get("admin_port") is not None:
            raise ValueError(f"must be set where {PREFIX}ADMIN_PORT is")
        return value


class UpSettings(Settings):
    """Those of `warmpath up`, which makes an admin key where none is given."""

    @field_validator("admin_key")
    @classmethod
    def _admin_port_needs_a_key(cls, value: SecretStr | None, given: ValidationInfo) -> SecretStr | None:
        return value


class ClientSettings(BaseSettings):
    """How a verb that is a client finds its gateway: by the variables that OpenAI's own clients read."""

    model_config = SettingsConfigDict(env_ignore_empty=True, extra="forbid", frozen=True, populate_by_name=True)

    base_url: str = Field(
        f"http://127.0.0.1:{DEFAULT_PORT}/v1",
        pattern=r"^https?://",
        validation_alias="OPENAI_BASE_URL",
        description="The gateway's base URL, /v1 included.",
    )
    api_key: SecretStr = Field(validation_alias="OPENAI_API_KEY", description="The key to call it with.")


def load_client_settings(**options: Any) -> ClientSettings:
    """As `load_settings`."""
    try:
        return ClientSettings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        problems = [f"{detail['loc'][0]}: {detail['msg'].lower()}" for detail in error.errors(include_url=False)]
        raise SettingsError("\n".join(problems)) from None


def load_settings(form: type[Settings] = Settings, **options: Any) -> Settings:
    """From the environment; an option that is not None wins. Raises `SettingsError`."""
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return form(**given)
    except ValidationError as error:
        raise SettingsError("\n".join(_in_words(error))) from None


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def misspelled_variables() -> list[str]:
    """Variables that look like one of ours and are none, each with what may have been meant."""
    ours = [variable(name) for name in Settings.model_fields]
    strays = [name for name in os.environ if name.startswith(PREFIX) and name not in ours]
    close = ((name, difflib.get_close_matches(name, ours, n=1, cutoff=0.85)) for name in sorted(strays))
    return [f"{name} is not a setting; did you mean {meant[0]}?" for name, meant in close if meant]


def resolve_secret(secret: EnvSecret) -> str:
    """The value that a policy's `{env: NAME}` stands for. Raises `SettingsError`."""
    value = os.environ.get(secret.env, "")
    if not value:
        raise SettingsError(f"the environment variable {secret.env}, which the policy names, is not set")
    return value


def missing_secrets(policy: Policy) -> Iterator[Finding]:
    """A `gateway.policy.Check`: every secret that the policy names is there."""
    for i, deployment in enumerate(policy.deployments):
        if deployment.api_key and not os.environ.get(deployment.api_key.env):
            path = ("deployments", i, "api_key", "env")
            yield path, f"the environment variable {deployment.api_key.env} is not set"


def _in_words(error: ValidationError) -> Iterator[str]:
    """Without the values: some are secrets."""
    for detail in error.errors(include_url=False):
        if detail["type"] == "default_factory_not_called":  # only says that another setting is wrong
            continue
        name = str(detail["loc"][0])  # the field, or its first alias
        field = Settings.model_fields.get(name)
        if detail["type"] == "value_error":
            message = str(detail["ctx"]["error"])
        else:
            message = detail["msg"].replace("Input should", "should").replace("String should", "should")
        hint = f" ({field.description})" if field else ""
        yield f"{variable(name) if field else _also_known_as(name)}: {message}{hint}"


def _also_known_as(alias: str) -> str:
    """Which of a setting's variables was set can not be told afterwards, so all of them are named."""
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
    "variable",
]
