"""Policy models of deployments (the inference servers) and of models (the names that clients request)."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from gateway.core.native_requests import MESSAGES, RESPONSES
from gateway.policy.disconnects import Means, OnDisconnect, disconnect_rule
from gateway.policy.fields import Count, CountOrZero, Frozen, Name, Names, Secret, Share, Weight, parts_of
from gateway.policy.media import Media
from gateway.policy.prices import Prices
from gateway.policy.roles import PREFILL
from gateway.policy.sources import PLACEHOLDER, Source, example_of, placeholder_problems
from gateway.policy.tenants import RateField
from gateway.policy.upstream_requests import BodyFields, ExtraHeaders, ExtraQuery, HeaderName
from gateway.policy.wildcards import STAR

SLOTS_MAX = 1024
ADDED_PROMPT_TOKENS = 4_096  # far more than published chat templates, tool preambles and system prompts of vendors have
ENDPOINTS = ("/chat/completions", "/completions", "/embeddings", "/messages")

NATIVE_APIS = {"anthropic": frozenset({MESSAGES})}  # that passed requests reach by default, by provider
# Providers whose servers may have the API. vLLM's Messages API takes no `cache_salt`, so that tenants would share a
# prefix cache.
NATIVE_PROVIDERS = {MESSAGES: ("anthropic", "openai"), RESPONSES: ("openai", "vllm")}

TEMPLATE_FIELDS = ("base_url", "model", "region", "kv_events", "kv_events_replay", "metrics")  # may have placeholders
ROLE_PROVIDERS = ("vllm", "warmpath")  # whose engines hand prompts over by `kv_transfer_params`
TEMPLATE_DEFAULTS = {"base_url": "http://{address}/v1", "model": "{model}"}


def _check_base_url(url: str) -> str:
    parts = urlsplit(example_of(url))
    try:
        reachable = bool(parts.hostname) and parts.port != 0
    except ValueError:
        reachable = False
    if not reachable:
        raise ValueError("must have a host and a valid port, as in http://10.0.0.5:8000/v1")
    if endpoint := next((known for known in ENDPOINTS if parts.path.rstrip("/").endswith(known)), None):
        raise ValueError(f"must not include the endpoint's path: remove {endpoint}")
    return url


class UpstreamTLS(Frozen):
    """Files for TLS to a deployment. Its certificate and host name are always verified."""

    ca: str | None = Field(
        None,
        min_length=1,
        description="PEM file of the certificate authorities that may sign its certificate. Default: the system's.",
    )
    cert: str | None = Field(
        None, min_length=1, description="PEM file of the client certificate that the gateway presents."
    )
    key: str | None = Field(
        None, min_length=1, description="PEM file of that certificate's private key, if `cert` does not contain it."
    )

    @model_validator(mode="after")
    def _key_of_a_certificate(self) -> UpstreamTLS:
        if self.key is not None and self.cert is None:
            raise ValueError("key: needs cert, the certificate that it belongs to")
        return self


class UpstreamProxy(Frozen):
    """An HTTP proxy through which a deployment is reached."""

    url: str = Field(pattern=r"^http://[^/@\s]+/?$", description="Its URL, as in http://10.0.0.1:3128.")
    login: Secret | None = Field(None, description="User and password, as in user:password, if it needs a login.")


class Plan(Frozen):
    """Limits of the plan that a deployment's key has at its vendor. Each gateway counts its own calls."""

    requests: RateField | None = Field(None, description="Requests, as in 500/1m.")
    tokens: RateField | None = Field(None, description="Tokens, input and output together, as in 200k/1m.")


def _required_or_source(schema: dict[str, Any]) -> None:
    """A template has defaults for `base_url` and `model`, which the schema for editors must allow to be missing."""
    schema["required"] = ["name"]
    schema["anyOf"] = [
        {"required": ["base_url", "model"]},
        {"required": ["source"], "properties": {"source": {"type": "object"}}},
    ]


class Deployment(Frozen):
    """A configured target: one model on one server. With a `source`, a template for all servers of the source."""

    model_config = ConfigDict(json_schema_extra=_required_or_source)

    name: Name = Field(description="Name in receipts, metrics and headers.")
    source: Source | None = Field(
        None,
        description="Makes this a template: each server that the source finds is a deployment NAME/SERVER with the "
        "settings of the template. `base_url`, `model`, `region`, `kv_events`, `kv_events_replay` and `metrics` may "
        "have the placeholders {host}, {port}, {address}, {name} and {label:NAME}.",
    )
    provider: Name = Field(
        "openai",
        description="Dialect of its API: openai, azure, anthropic, gemini, ollama, warmpath, vllm, sglang, trtllm or "
        "llamacpp.",
    )
    base_url: Annotated[str, AfterValidator(_check_base_url)] = Field(
        pattern=r"^https?://",
        description="Base URL of its API, including /v1. Default of a template: http://{address}/v1.",
    )
    model: Name = Field(
        description="Model name that the server expects. A `*` in it is what the `*` of the client's model name stands "
        "for, as in {name: openai/*}. Default of a template: the label `model`, or else the first model that the "
        "server lists."
    )
    max_concurrency: Count = Field(64, description="Maximum calls in flight.")
    plan: Plan = Field(
        Plan(), description="Limits of its own plan. A deployment that has used them rests, and others get the calls."
    )
    slots: Count | None = Field(
        None,
        description="llamacpp: number of its slots (--parallel). Each call is then sent to the slot that holds its "
        "conversation, and `max_concurrency` defaults to this number. Default: the server chooses the slots.",
    )
    native: tuple[Literal["messages", "responses"], ...] | None = Field(
        None,
        description="API formats of clients that the server has itself: messages (Anthropic's) and responses "
        "(OpenAI's). Their requests pass to it as the client sent them, and so do the answers. Default: messages for "
        "anthropic, none for others. With `defaults`, `overrides`, `system_prompt`, `leave_out` or "
        "`media_urls: fetch`, all requests are translated.",
    )
    default_max_tokens: Count = Field(
        8_192, description="anthropic, whose API requires `max_tokens`: the value for calls that set none."
    )
    api_key: Secret | None = Field(None, description="API key that the gateway sends.")
    key_header: HeaderName | None = Field(
        None,
        description="Header in which the key is sent: authorization has it as a bearer token, other headers as it is. "
        "Default: the provider's, as api-key for azure.",
    )
    tls: UpstreamTLS | None = Field(
        None, description="Files for TLS, if `base_url` is https and the system's certificate authorities do not fit."
    )
    proxy: UpstreamProxy | None = Field(
        None,
        description="HTTP proxy through which it is reached: by a tunnel (CONNECT) if `base_url` is https. Variables "
        "such as HTTPS_PROXY are not read.",
    )
    headers: ExtraHeaders = Field(
        {}, description="Headers that are sent with each request. A value may be a secret, as in {env: MY_TOKEN}."
    )
    query: ExtraQuery = Field({}, description="Query parameters of each request that generates an answer.")
    defaults: BodyFields = Field({}, description="Body fields of chats and completions that the client did not set.")
    overrides: BodyFields = Field(
        {}, description="Body fields of chats and completions that replace what the client set."
    )
    system_prompt: str | None = Field(
        None, min_length=1, description="Text that is put before the system prompt of each chat."
    )
    price: Prices = Field(
        (), description="Price of its tokens: one price, or a list, of which the first that applies to a call is used."
    )
    priorities: bool = Field(
        False,
        description="vllm, sglang, trtllm: send each call's priority, because the server schedules by priority "
        "(`--scheduling-policy priority`, `--enable-priority-scheduling`, `waiting_queue_policy: priority`). The "
        "bundled engine always receives it.",
    )
    region: Name | None = Field(
        None,
        description="Where it runs, as in eu-west-1. Selects prices with `region`, and is in the FOCUS export. A "
        "template may have {label:NAME} here.",
    )
    leave_out: Names = Field(
        (), description="Body fields that the server rejects and that are not sent to it, as in [stream_options]."
    )
    continuous_usage: bool = Field(
        False,
        description="The server can report usage in every chunk (`continuous_usage_stats`), so that a cut stream is "
        "billed exactly.",
    )
    added_prompt_tokens: CountOrZero = Field(
        ADDED_PROMPT_TOKENS,
        description="The most tokens that the server adds to a prompt: chat template, system prompt of its own, search "
        "results. Usage above the prompt's bytes plus this is implausible, and is billed by an estimate.",
    )
    on_disconnect: OnDisconnect = Field(
        OnDisconnect(), description="How calls are billed whose clients disconnect before the deployment counted them."
    )
    strict_done: bool = Field(
        False,
        description="A stream without `[DONE]` at its end is cut, even if its last events say that it is complete.",
    )
    cache_tokens: Count = Field(
        262_144, description="Initial estimate of its prefix cache's size in tokens. Replies correct it."
    )
    prefill_tokens_per_second: Count = Field(
        2_000, description="Initial estimate of its prefill speed. Replies correct it."
    )
    media: Media | None = Field(
        None,
        description="How its tokens of images, sound, video and files are estimated. Default: the model's `media`.",
    )
    media_urls: Literal["pass", "fetch"] | None = Field(
        None,
        description="URLs of images, sound, video and files in chats. pass: the server gets them and fetches them. "
        "fetch: the gateway fetches them and sends the data, if `media_fetch` allows their hosts. Default: pass what "
        "the provider's API takes by URL, and fetch the rest.",
    )
    kv_events: str | None = Field(
        None,
        pattern=r"^(tcp://[^\s/]+:\d+|ipc://\S+|https?://\S+)$",
        description="Where it publishes KV events: the ZeroMQ address of vLLM, SGLang or the bundled engine, or the "
        "HTTP address of a TensorRT-LLM server, whose events only one client can read.",
    )
    kv_events_replay: str | None = Field(
        None,
        pattern=r"^(tcp://[^\s/]+:\d+|ipc://\S+)$",
        description="Where it replays missed KV events: its replay_endpoint.",
    )
    kv_transfer_tokens_per_second: Count | None = Field(
        None,
        description="warmpath: how many tokens' keys and values its network carries per second, if the engine runs "
        "with `--kv-transfer` and `--kv-transfer-peers`. It then loads the beginning of a prompt from another such "
        "deployment of the model that has it cached, if that is predicted to take less time than to compute it.",
    )
    role: Literal["prefill", "decode"] | None = Field(
        None,
        description="vllm, warmpath: which phase of calls it computes. prefill: only prompts, whose keys and values "
        "the decode deployments of the model load from it. decode: answers, and the prompts that "
        "`routing.remote_prefill_above` leaves to it. Default: both.",
    )
    metrics: bool | Annotated[str, Field(pattern=r"^https?://")] = Field(
        False,
        description="Whether to read its load from /metrics, beside /v1; or the URL to read it from. The metric "
        "names of vLLM, SGLang, llama.cpp and TensorRT-LLM are supported.",
    )

    def bills_disconnect_by(self, *, stream: bool) -> Means:
        """How a call is billed if its client disconnects: as the policy says, or else by the vendor's rule."""
        if self.on_disconnect.bill is not None:
            return self.on_disconnect.bill
        rule = disconnect_rule(self.provider, self.base_url)
        return rule.stream if stream else rule.answer

    @property
    def native_apis(self) -> frozenset[str]:
        """The API formats of clients whose requests pass to the server unchanged."""
        adjusts = self.defaults or self.overrides or self.leave_out or self.system_prompt is not None
        if adjusts or self.media_urls == "fetch":
            return frozenset()  # these are in terms of a chat
        return NATIVE_APIS.get(self.provider, frozenset()) if self.native is None else frozenset(self.native)

    def model_for(self, wildcard: str) -> str:
        """The model's name on the server. `wildcard` is what the `*` in the name stands for."""
        return self.model.replace(STAR, wildcard)

    @property
    def has_regions(self) -> bool:
        """Whether it is a template whose servers have their own regions."""
        return self.source is not None and PLACEHOLDER.search(self.region or "") is not None

    @property
    def shown_url(self) -> str:
        """The base URL without the parts that may be secret: user, password and query."""
        url = urlsplit(self.base_url)
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"

    @model_validator(mode="before")
    @classmethod
    def _template_defaults(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("source") is not None:
            return {**TEMPLATE_DEFAULTS, **data}
        return data

    @model_validator(mode="before")
    @classmethod
    def _one_call_per_slot(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("slots") is not None:  # `max_concurrency` defaults to the slots
            return {"max_concurrency": data["slots"], **data}
        return data

    @model_validator(mode="after")
    def _valid_placeholders(self) -> Deployment:
        for field in TEMPLATE_FIELDS:
            text = getattr(self, field)
            if isinstance(text, str) and PLACEHOLDER.search(text):
                if self.source is None:
                    if field in ("model", "metrics", "region"):  # which may contain braces for themselves
                        continue
                    raise ValueError(f"{field}: placeholders need source, where servers are found")
                for problem in placeholder_problems(text):
                    raise ValueError(f"{field}: {problem}")
        return self

    @model_validator(mode="after")
    def _native_apis_fit(self) -> Deployment:
        for api in self.native or ():
            if self.provider not in NATIVE_PROVIDERS[api]:
                known = " and ".join(NATIVE_PROVIDERS[api])
                raise ValueError(f"native: {api} passes only to the providers {known}, not to {self.provider}")
        return self

    @model_validator(mode="after")
    def _has_records(self) -> Deployment:
        if self.on_disconnect.bill == "record" and self.provider != "warmpath":
            raise ValueError(f"on_disconnect.bill: the provider {self.provider} keeps no usage records; only warmpath")
        return self

    @model_validator(mode="after")
    def _transfers_blocks(self) -> Deployment:
        if self.kv_transfer_tokens_per_second is None:
            return self
        field = "kv_transfer_tokens_per_second"
        if self.provider != "warmpath":
            raise ValueError(f"{field}: the provider {self.provider} has no such transfers; only warmpath has")
        if not self.base_url.startswith("http://"):
            raise ValueError(f"{field}: base_url must begin with http://, since engines transfer blocks without TLS")
        return self

    @model_validator(mode="after")
    def _role_fits(self) -> Deployment:
        if self.role is None:
            return self
        if self.provider not in ROLE_PROVIDERS:
            known = " and ".join(ROLE_PROVIDERS)
            raise ValueError(f"role: the provider {self.provider} cannot hand prompts over; only {known} can")
        if self.role == PREFILL and self.provider == "warmpath" and not self.base_url.startswith("http://"):
            raise ValueError("role: base_url must begin with http://, since engines transfer blocks without TLS")
        return self

    @model_validator(mode="after")
    def _tls_needs_https(self) -> Deployment:
        if self.tls is not None and not self.base_url.startswith("https://"):
            raise ValueError("tls: base_url must begin with https://")
        return self

    @model_validator(mode="after")
    def _slots_fit(self) -> Deployment:
        if self.slots is None:
            return self
        if self.provider != "llamacpp":
            raise ValueError(f"slots: the provider {self.provider} has none; only llamacpp has")
        if self.slots > SLOTS_MAX:
            raise ValueError(f"slots: must be at most {SLOTS_MAX}")
        if self.max_concurrency > self.slots:
            raise ValueError(f"max_concurrency: must be at most slots ({self.slots}), not {self.max_concurrency}")
        return self


class FallbacksWhen(Frozen):
    """Models to try if a deployment rejects a request for a named reason, instead of passing the rejection on."""

    context: Names = Field((), description="Models to try, in order, if the prompt is too long for this one.")
    refused_content: Names = Field(
        (), description="Models to try, in order, if this one's content filter rejects the request."
    )

    def models(self, reason: str) -> tuple[str, ...]:
        """The models for a reason, which is the name of a field or empty."""
        names: tuple[str, ...] = getattr(self, reason) if reason else ()
        return names


class Mirror(Frozen):
    """Sends a share of a model's calls to another deployment as well, whose answers are only compared."""

    deployment: Name = Field(description="Deployment that gets the copies, by name.")
    share: Share = Field(1.0, description="Share of the calls, as in 5%.")
    max_in_flight: Count = Field(4, description="Most copies in flight at each gateway process. Others are dropped.")


class Model(Frozen):
    """A model that clients can request, and the deployments that serve it."""

    name: Name = Field(
        description="Model id that clients send. With one `*`, as in openai/*, the entry is for all models whose names "
        "match and that have no entry of their own."
    )
    aliases: tuple[Name, ...] = Field((), description="Further names of the model.")
    deployments: tuple[Name, ...] = Field(min_length=1, description="Deployments that serve it, by name.")
    fallbacks: tuple[Name, ...] = Field((), description="Models to try, in order, if none of its deployments answers.")
    fallbacks_when: FallbacksWhen = Field(
        FallbacksWhen(), description="Models to try if a deployment rejects a request for a named reason."
    )
    continue_cut_streams: bool | None = Field(
        None,
        description="Whether its cut streams resume on another deployment. Default: as the latency class says.",
    )
    media: Media | None = Field(
        None,
        description="How the tokens of images, sound, video and files are estimated for deployments without `media` of "
        "their own. Default: by the deployment's model and provider.",
    )
    mirror: Mirror | None = Field(
        None,
        description="Copies a share of its calls to another deployment after they were answered, and compares the "
        "answers in metrics and in the log. The copies are not billed, and no call waits for them.",
    )
    weights: dict[Name, Weight] | None = Field(
        None,
        description="Weights of its deployments, as in {old: 90, new: 10}, instead of choosing by cost: so many of the "
        "conversations go to each. A conversation stays at its deployment, which is known by its session or "
        "prompt_cache_key, else by the end user, else by its first messages. If that deployment is full or fails, "
        "another one answers. Deployments without a weight get only such calls.",
    )
    max_output_tokens: Count = Field(
        16_384,
        description="The most output tokens that its deployments generate for a call without `max_tokens`, which is "
        "what budgets reserve for it.",
    )
    price: Prices = Field((), description="Price of its tokens on deployments without a price of their own.")
    cache_price: Prices = Field((), description="Price of answers from the response cache. Default: free.")

    @cached_property
    def weight_ends(self) -> tuple[tuple[str, float], ...]:
        """For each deployment with a weight, where its part of the conversations ends. Empty without weights."""
        return parts_of(self.weights or {})

    @property
    def all_fallbacks(self) -> tuple[str, ...]:
        """All models that may answer instead of this one, each once."""
        when = self.fallbacks_when
        return tuple(dict.fromkeys((*self.fallbacks, *when.context, *when.refused_content)))
