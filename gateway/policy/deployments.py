"""The servers behind the gateway, what their tokens cost, and the names under which they are offered."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from gateway.policy.fields import Count, EnvSecret, Frozen, Name, Names
from gateway.policy.prices import Prices

SLOTS_MAX = 1024
ENDPOINTS = ("/chat/completions", "/completions", "/embeddings", "/messages")


def _leads_to_an_api(url: str) -> str:
    parts = urlsplit(url)
    try:
        reachable = bool(parts.hostname) and parts.port != 0
    except ValueError:
        reachable = False
    if not reachable:
        raise ValueError("names no host and port that could be reached, as in http://10.0.0.5:8000/v1")
    if endpoint := next((known for known in ENDPOINTS if parts.path.rstrip("/").endswith(known)), None):
        raise ValueError(f"ends before the endpoint, which is added to it: leave {endpoint} out")
    return url


class Deployment(Frozen):
    """A configured target: one server, one model on it."""

    name: Name = Field(description="How receipts, metrics and headers name it.")
    provider: Name = Field(
        "openai", description="The dialect it speaks: openai, anthropic, warmpath, vllm, sglang, llamacpp."
    )
    base_url: Annotated[str, AfterValidator(_leads_to_an_api)] = Field(
        pattern=r"^https?://", description="The base URL of its API, /v1 included."
    )
    model: Name = Field(description="The model's name on that server.")
    max_concurrency: Count = Field(64, description="Calls that it is sent at the same time, at most.")
    slots: Count | None = Field(
        None,
        description="llamacpp: how many slots it has (--parallel). Calls then go to the slot that holds their "
        "conversation, and `max_concurrency` is as many, where it is left out. Left out: the server chooses slots.",
    )
    default_max_tokens: Count = Field(
        8_192, description="anthropic, where every call must set one: `max_tokens` of a call that sets none."
    )
    api_key: EnvSecret | None = Field(None, description="The key it is called with.")
    price: Prices = Field(
        (), description="What its tokens cost: one price, or several of which the first that fits a call holds."
    )
    priorities: bool = Field(
        False,
        description="vllm, sglang, trtllm: its scheduler knows priorities (`--scheduling-policy priority`, "
        "`--enable-priority-scheduling`, `waiting_queue_policy: priority`), and is told each call's. The bundled "
        "engine always is.",
    )
    leave_out: Names = Field(
        (), description="Fields of a body that it refuses: they are not sent to it. As in [stream_options]."
    )
    continuous_usage: bool = Field(
        False, description="It can count in every chunk (`continuous_usage_stats`): a stream that is cut is exact then."
    )
    cache_tokens: Count = Field(
        262_144, description="First guess of how many tokens its prefix cache holds, until replies teach better."
    )
    prefill_tokens_per_second: Count = Field(
        2_000, description="First guess of its prefill speed, until replies teach better."
    )
    kv_events: str | None = Field(
        None,
        pattern=r"^(tcp://[^\s/]+:\d+|ipc://\S+|https?://\S+)$",
        description="Where it publishes its KV events: the ZeroMQ address of vLLM, SGLang or the bundled engine; or "
        "the http address of a TensorRT-LLM server that nobody else asks for them.",
    )
    kv_events_replay: str | None = Field(
        None,
        pattern=r"^(tcp://[^\s/]+:\d+|ipc://\S+)$",
        description="Where it sends missed KV events again: its replay_endpoint.",
    )
    metrics: bool | Annotated[str, Field(pattern=r"^https?://")] = Field(
        False,
        description="Whether its load is read at /metrics, beside /v1; or the URL where it is. The names of vLLM, "
        "SGLang, llama.cpp and TensorRT-LLM are known.",
    )

    @property
    def shown_url(self) -> str:
        """The base URL without what may be a secret: a user, a password, a query."""
        url = urlsplit(self.base_url)
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"

    @model_validator(mode="before")
    @classmethod
    def _a_call_for_each_slot(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("slots") is not None:
            return {"max_concurrency": data["slots"], **data}
        return data

    @model_validator(mode="after")
    def _slots_fit(self) -> Deployment:
        if self.slots is None:
            return self
        if self.provider != "llamacpp":
            raise ValueError(f"slots: the dialect {self.provider} has none; llamacpp has")
        if self.slots > SLOTS_MAX:
            raise ValueError(f"slots: at most {SLOTS_MAX}")
        if self.max_concurrency > self.slots:
            raise ValueError(f"max_concurrency: {self.max_concurrency} calls do not fit into {self.slots} slots")
        return self


class Model(Frozen):
    """A name that clients ask for, and where it is served."""

    name: Name = Field(description="The model id that clients send.")
    aliases: tuple[Name, ...] = Field((), description="Further names for it.")
    deployments: tuple[Name, ...] = Field(min_length=1, description="Where it is served, by deployment name.")
    fallbacks: tuple[Name, ...] = Field((), description="Models tried, in order, when none of its deployments answers.")
    continue_cut_streams: bool | None = Field(
        None, description="Whether its streams go on at another server when they are cut; left out: as the class says."
    )
    price: Prices = Field((), description="What its tokens cost at deployments that have no price of their own.")
    cache_price: Prices = Field((), description="What answers from the response cache cost; left out: nothing.")
