"""The servers behind the gateway, what their tokens cost, and the names under which they are offered."""

from __future__ import annotations

from decimal import Decimal
from functools import cached_property

from pydantic import Field

from gateway.money import PRICE_DECIMALS, atoms_per_token
from gateway.policy.fields import Count, EnvSecret, Frozen, Name


class Price(Frozen):
    """Money per million tokens, as decimals. A cached price left out means: the full input price."""

    input: Decimal = Field(
        ge=0, max_digits=18, decimal_places=PRICE_DECIMALS, description="Per million input tokens that were computed."
    )
    cached_input: Decimal | None = Field(
        None, ge=0, max_digits=18, decimal_places=PRICE_DECIMALS,
        description="Per million input tokens read from a prefix cache.",
    )  # fmt: skip
    output: Decimal = Field(
        Decimal(0), ge=0, max_digits=18, decimal_places=PRICE_DECIMALS,
        description="Per million output tokens, reasoning included.",
    )  # fmt: skip
    currency: str = Field("USD", pattern="^[A-Z]{3}$", description="ISO 4217 code.")
    version: str = Field("1", description="Written into every receipt; change it with the price.")

    @cached_property
    def atoms(self) -> tuple[int, int, int]:
        """What a token costs in `money`'s atoms: computed input, cached input, output."""
        cached_input = self.input if self.cached_input is None else self.cached_input
        return atoms_per_token(self.input), atoms_per_token(cached_input), atoms_per_token(self.output)

    @cached_property
    def texts(self) -> tuple[str, str | None, str]:
        """The three prices as receipts have them, per million tokens and without exponents."""
        cached_input = None if self.cached_input is None else f"{self.cached_input:f}"
        return f"{self.input:f}", cached_input, f"{self.output:f}"


class Deployment(Frozen):
    """A configured target: one server, one model on it."""

    name: Name = Field(description="How receipts, metrics and headers name it.")
    provider: Name = Field("openai", description="The dialect it speaks: openai, warmpath, vllm.")
    base_url: str = Field(pattern=r"^https?://", description="The OpenAI-compatible base URL, /v1 included.")
    model: Name = Field(description="The model's name on that server.")
    max_concurrency: Count = Field(64, description="Calls that it is sent at the same time, at most.")
    api_key: EnvSecret | None = Field(None, description="The key it is called with.")
    price: Price | None = Field(None, description="What its tokens cost; without one, receipts say unpriced.")
    cache_tokens: Count = Field(
        262_144, description="First guess of how many tokens its prefix cache holds, until replies teach better."
    )
    prefill_tokens_per_second: Count = Field(
        2_000, description="First guess of its prefill speed, until replies teach better."
    )


class Model(Frozen):
    """A name that clients ask for, and where it is served."""

    name: Name = Field(description="The model id that clients send.")
    aliases: tuple[Name, ...] = Field((), description="Further names for it.")
    deployments: tuple[Name, ...] = Field(min_length=1, description="Where it is served, by deployment name.")
    fallbacks: tuple[Name, ...] = Field((), description="Models tried, in order, when none of its deployments answers.")
