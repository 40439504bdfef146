"""`warmpath import`: converts another gateway's configuration to a policy, and reports what was not carried over."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
import yaml
from pydantic import ValidationError

from gateway.cli.common import fail, verb_app, warn
from gateway.policy import Policy
from gateway.policy.file import PolicyError, findings, parse_yaml
from gateway.policy.litellm_config import UnreadableConfig, convert

app = verb_app(help="Convert the configuration of another gateway to a policy.")


@app.command()
def import_config(
    form: Annotated[Literal["litellm"], typer.Argument(metavar="FORM", help="litellm: its proxy's config.yaml.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="The configuration.")],
) -> None:
    """Print a policy with the deployments, models, aliases, fallbacks, weights, plans and prices of a configuration.

    What was not carried over is listed on stderr, with what to do instead. Keys of clients are not carried over.
    Secrets in the file become references to environment variables.
    """
    try:
        converted = convert(parse_yaml(file.read_bytes(), file=str(file)))
        Policy.model_validate(converted.policy)
    except PolicyError as error:
        fail(str(error))
    except UnreadableConfig as error:
        fail(f"{file}: {error}")
    except ValidationError as error:
        where, message = next(iter(findings(error)))
        fail(f"{file}: converts to an invalid policy: {'.'.join(map(str, where))}: {message}")
    typer.echo(yaml.safe_dump(converted.policy, sort_keys=False, allow_unicode=True, width=110), nl=False)
    for path, advice in converted.omitted:
        warn(f"not carried over: {path}: {advice}")
