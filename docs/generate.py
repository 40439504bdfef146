"""The reference pages, from the code that they describe: `make docs`, or `python -m docs.generate`.

Each page is a function from the code to its text. `tests/docs` fails where a page is not what its function says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer.main
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from pydantic import AliasChoices, ByteSize, SecretStr
from pydantic.fields import FieldInfo
from typer.core import TyperGroup

from backend.engine.engine import EngineStats
from backend.options import build_parser as build_engine_parser
from backend.server.metrics import ServerMetrics as EngineMetrics
from gateway.cli import app as warmpath_app
from gateway.policy import BUILT_IN_CLASSES, Policy
from gateway.settings import Settings, variable
from gateway.telemetry import observable
from gateway.telemetry.metrics import Metrics as GatewayMetrics

ROOT = Path(__file__).parents[1]
HELP_COLUMNS = 100
GENERATED = "<!-- Made by `make docs` from {source}. Change that, not this page. -->\n"

Schema = dict[str, Any]


# -- docs/reference/policy.md --------------------------------------------------------------------------------------

POLICY_OPENING = """# Policy reference

A policy is one YAML file: which servers there are, what they are called, who may use them and how much. It is checked
whole before it takes effect. An unknown key is an error.
[`policies/default.yaml`](../../policies/default.yaml) has every field with a comment, and
[`policies/examples`](../../policies/examples) has shorter ones to begin with.

`warmpath check FILE` names every mistake by file, line and column. A running gateway looks at its file once a second,
and at once on SIGHUP. It takes a valid policy over whole. Of an invalid one it logs the mistakes, and keeps the policy
that it has. A call keeps the policy that it began with. Every receipt names the policy it was served under by its hash.

Editors that know the YAML language server check a policy as it is typed, with this line at its top:
`# yaml-language-server: $schema=policy.schema.json`. `warmpath check --schema` prints that schema.

How values are written:

| Kind | Examples | Meaning |
|---|---|---|
| duration | `250ms` `10s` `5m` `24h` `7d` | a bare number is seconds |
| count | `600` `64k` `1.5M` `2G` | decimal multiples; a whole number |
| rate | `600/1m` `1M/1m` | a count per duration; long form: `{amount: 600, period: 1m}` |
| share | `10%` `0.1` | from 0 to 1 |
| money | `0.10` | a decimal, never rounded |
| day or time | `2026-12-01` `2026-12-01T06:00:00Z` | UTC where it does not say otherwise; a day is its first moment |
| name | `h200-a` | text of 1 to 200 characters |
"""

KINDS = {  # what a text of this pattern is called
    r"^\d+(\.\d+)?\s*(ms|s|m|h|d)$": "duration",
    r"^\d+(\.\d+)?[kKMG]?$": "count",
    r"^\d+(\.\d+)?[kKMG]?/\d+(\.\d+)?\s*(ms|s|m|h|d)$": "rate",
    r"^\d+(\.\d+)?\s*%$": "share",
    r"^\d{4}-\d{2}-\d{2}": "day or time",
}


def policy_page() -> str:
    schema = Policy.model_json_schema()
    parts = [GENERATED.format(source="gateway/policy/"), POLICY_OPENING, _policy_section("", schema)]
    for path, model in _nested(schema, schema["$defs"]):
        parts.append(_policy_section(path, model))
        if path == "classes.NAME":
            parts.append(_built_in_classes())
    return "\n".join(parts)


def _built_in_classes() -> str:
    columns = ["Class", *next(iter(BUILT_IN_CLASSES.values()))]
    rows = [
        [f"`{name}`", *(f"`{value:g}s`" if isinstance(value, float) else f"`{value}`" for value in fields.values())]
        for name, fields in BUILT_IN_CLASSES.items()
    ]
    return "Two classes always exist. A policy that names one changes only what it says:\n\n" + _table(columns, rows)


def _nested(schema: Schema, models: dict[str, Schema], prefix: str = "") -> Iterator[tuple[str, Schema]]:
    """Every model below `schema` with the path at which it stands, in the order of the file, each model once."""
    for name, field in schema["properties"].items():
        for variant in (field, field.get("items", {}), field.get("additionalProperties", {}), *field.get("anyOf", ())):
            if isinstance(variant, dict) and (reference := variant.get("$ref")):
                model = models.pop(reference.rpartition("/")[2], None)
                if model is None:
                    continue
                among = "[]" if variant is field.get("items") else ""
                among = ".NAME" if variant is field.get("additionalProperties") else among
                path = f"{prefix}{name}{among}"
                yield path, model
                yield from _nested(model, models, f"{path}.")


def _policy_section(path: str, model: Schema) -> str:
    rows = [
        (f"`{name}`", _kind(field), _default(name in model.get("required", ()), field), field["description"])
        for name, field in model["properties"].items()
    ]
    title = f"`{path}`" if path else "The file"
    said = model.get("description", "").replace("\n", " ")
    return "\n".join(
        [f"## {title}\n", *([f"{said}\n"] if said else []), _table(("Key", "Kind", "Default", "Meaning"), rows)]
    )


def _kind(field: Schema) -> str:
    if "$ref" in field:
        return "mapping"
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if variants := [variant for variant in field.get("anyOf", ()) if variant.get("type") != "null"]:
        kinds = [_kind(variant) for variant in variants]
        quantity = next((kind for kind in kinds if kind in KINDS.values()), None)
        words = [kind for kind in kinds if kind.startswith("`")]
        return " or ".join([*words, quantity]) if quantity is not None else _alternatives(kinds)
    if field.get("pattern") in KINDS:
        return KINDS[field["pattern"]]
    if "pattern" in field:
        return f"text, `{field['pattern']}`"
    return _plain_kind(field)


def _plain_kind(field: Schema) -> str:
    match field.get("type"):
        case "array":
            return f"list of {_kind(field['items'])}s"
        case "object":
            return "mapping"
        case "string":
            return "name" if field.get("maxLength") else "text"
        case other:
            return str(other)


def _alternatives(kinds: list[str]) -> str:
    """A decimal may be written as a number or, to keep its zeros, as a text."""
    distinct = list(dict.fromkeys(kinds))
    return "money" if distinct == ["number", "text"] else " or ".join(distinct)


def _default(required: bool, field: Schema) -> str:
    if required:
        return "required"
    default = field.get("default")
    if isinstance(default, dict) or "default" not in field:
        return "see below"
    if default is None or default == []:
        return "none"
    number = f"{default:g}" if isinstance(default, float) else str(default)
    is_time = not isinstance(default, str) and _kind(field) == "duration"
    return f"`{number}s`" if is_time else f"`{number}`"


# -- docs/reference/settings.md ------------------------------------------------------------------------------------

SETTINGS_OPENING = """# Settings reference

Settings say where things are, and hold secrets. They are environment variables. What is allowed and preferred is
[policy](policy.md). Options of the command line win over settings. A name that is almost one of these gets a warning.

"""

COMPUTED_DEFAULTS = {  # from where and on which machine it runs
    "policy": "`policies/default.yaml`",
    "ledger_dir": "`DATA_DIR/ledger`",
    "replica": "the host's name",
}


def settings_page() -> str:
    rows = [
        (
            ", ".join(f"`{name}`" for name in _variables(name, field)),
            _setting_default(name, field),
            field.description or "",
        )
        for name, field in Settings.model_fields.items()
    ]
    return "\n".join(
        [
            GENERATED.format(source="gateway/settings.py"),
            SETTINGS_OPENING + _table(("Variable", "Default", "Meaning"), rows),
            "`warmpath up` keeps limits, cache and keys in `sqlite:///DATA_DIR/warmpath.db` unless `WARMPATH_STORAGE` "
            "says otherwise.\nKeys of servers are named by the policy (`api_key: {env: NAME}`) and read from the "
            "environment, too.\n",
        ]
    )


def _variables(name: str, field: FieldInfo) -> list[str]:
    if isinstance(field.validation_alias, AliasChoices):
        return [str(choice) for choice in field.validation_alias.choices]
    return [variable(name)]


def _setting_default(name: str, field: FieldInfo) -> str:
    if name in COMPUTED_DEFAULTS:
        return COMPUTED_DEFAULTS[name]
    default = field.get_default()
    if isinstance(default, SecretStr):
        default = default.get_secret_value()
    if default in (None, ""):
        return "none"
    return f"`{default.human_readable()}`" if isinstance(default, ByteSize) else f"`{default}`"


# -- docs/reference/cli.md -----------------------------------------------------------------------------------------

CLI_OPENING = """# Command reference

Exit codes are the same everywhere: 0 done, 1 a problem was found, 2 asked for the wrong way. Answers go to stdout,
everything else to stderr. `python -m gateway` is the same command.

"""

ENGINE_OPENING = """`warmpath engine` is this command, and passes its options on.
"""


def cli_page() -> str:
    sections = list(_helps("warmpath", typer.main.get_command(warmpath_app), None))
    sections.append(f"## `python -m backend`\n\n{ENGINE_OPENING}\n{_engine_options()}")
    return GENERATED.format(source="the --help of each command") + "\n" + CLI_OPENING + "\n".join(sections)


def _helps(name: str, command: Any, parent: Any) -> Iterator[str]:
    """The help of a command and of all below it."""
    context = command.make_context(
        name, [], parent=parent, resilient_parsing=True,
        terminal_width=HELP_COLUMNS, max_content_width=HELP_COLUMNS,
    )  # fmt: skip
    yield f"## `{context.command_path}`\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, TyperGroup):
        for verb in command.list_commands(context):
            yield from _helps(verb, command.get_command(context, verb), context)


def _engine_options() -> str:
    """Not as argparse prints them: that differs from one version of Python to the next."""
    rows = []
    for action in build_engine_parser()._actions:
        value = action.metavar or ("|".join(action.choices) if action.choices else "")
        names = " ".join([*action.option_strings, str(value)]).strip()
        rows.append((f"`{names}`", (action.help or "") % {"default": action.default}))
    return _table(("Option", "Meaning"), rows)


# -- docs/reference/metrics.md -------------------------------------------------------------------------------------

METRICS_OPENING = """# Metrics reference

The gateway and the bundled engine each have `GET /metrics` in Prometheus' text format. It needs no key: do not publish
it. No label takes its value from a client. For bills, use the ledger (`warmpath usage`): metrics begin again at zero
with every start. Of several workers (`warmpath serve --workers`) each series has the label `worker` besides.

The engine's metrics have vLLM's names where vLLM has the same figure, so one dashboard shows both. What has no
counterpart begins with `warmpath:`.
"""


class _IdleEngine:
    """What the engine's collector asks of an engine."""

    healthy = True

    def stats(self) -> EngineStats:
        counted = (0,) * 10
        return EngineStats(0, 0, 1, 1, 0.0, *counted, (), (0,) * 14, 0, {}, 0, 0, 0, 0, 0, 0, True, 0)


def metrics_page() -> str:
    gateway = GatewayMetrics()
    for metric in vars(observable).values():
        if isinstance(metric, observable.ObservableMetric):
            gateway.register(metric, dict)
    engine = EngineMetrics(_IdleEngine(), "demo", 16)  # type: ignore[arg-type]
    return "\n".join(
        [
            GENERATED.format(source="the registries of gateway and engine"),
            METRICS_OPENING,
            f"## Gateway\n\n{_metrics_table(gateway._registry)}",
            f"## Engine\n\n{_metrics_table(engine._registry)}",
        ]
    )


def _metrics_table(registry: CollectorRegistry) -> str:
    rows = []
    for collector in registry._collector_to_names:
        for family in collector.describe() if hasattr(collector, "describe") else collector.collect():
            if family.name.startswith("process_"):
                continue
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = ", ".join(f"`{label}`" for label in _labels(collector, family)) or "none"
            rows.append((f"`{name}`", family.type, labels, family.documentation))
    return _table(("Name", "Type", "Labels", "Meaning"), rows)


def _labels(collector: Collector, family: Metric) -> Sequence[str]:
    """The client library tells of labels only once they have values, unless asked in private."""
    for source in (family, collector):
        if names := getattr(source, "_labelnames", ()):
            return tuple(names)
    return tuple(family.samples[0].labels) if family.samples else ()


# ------------------------------------------------------------------------------------------------------------------

PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/policy.md": policy_page,
    "docs/reference/settings.md": settings_page,
    "docs/reference/cli.md": cli_page,
    "docs/reference/metrics.md": metrics_page,
}


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_cell(text) for text in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(text: str) -> str:
    """Outside of code, Markdown takes `<id>` for HTML."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))


def main() -> None:
    for name, page in PAGES.items():
        (ROOT / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
