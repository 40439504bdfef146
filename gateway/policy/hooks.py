"""Policy model of hooks: functions of the operator that see requests before, and answers after, a deployment."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gateway.policy.fields import Frozen, Name, Names, Seconds

Function = Annotated[
    str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="A Python function, as in our_hooks.pii:mask.")
]


class Hook(Frozen):
    """Functions that run in the gateway's process, with all its rights. Name only code that you trust."""

    name: Name = Field(description="Name in errors, logs and metrics.")
    before: Function | None = Field(
        None, description="Function for each request, as in our_hooks.pii:mask. It may change or reject the request."
    )
    after: Function | None = Field(
        None,
        description="Function for each text of an answer. It may change or reject the answer. A stream is held back "
        "until it is complete.",
    )
    timeout: Seconds = Field(1.0, description="Longest time of one call of a function.")
    on_error: Literal["refuse", "continue"] = Field(
        "refuse",
        description="If a function fails or takes too long. refuse: the request fails. continue: the request "
        "continues without the hook.",
    )
    tenants: Names | None = Field(None, description="Tenants whose requests it sees. Default: all.")
    models: Names | None = Field(None, description="Models, as requested, whose requests it sees. Default: all.")

    @model_validator(mode="after")
    def _has_a_function(self) -> Self:
        if self.before is None and self.after is None:
            raise ValueError("must have before or after")
        return self
