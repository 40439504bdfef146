"""How calls are billed that end early: by default after the rule of the deployment's vendor.

A vendor bills a prompt that it has received, whether or not the client waits for the answer. What it bills of the
answer depends on whether it notices that the client has disconnected. `RULES` has one rule for each vendor. The last
rule that matches applies, so rules by host come after rules by provider. Sources of the rules: the engines' own
behaviour, and the list of providers that OpenRouter publishes with its documentation of cancelled streams
(openrouter.ai/docs, "Stream cancellation").
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field

from gateway.policy.fields import Frozen, Seconds

Means = Literal["record", "read_to_end", "received"]


class DisconnectRule(NamedTuple):
    """What one vendor bills if the client leaves. `stream` and `answer` are the default means of both kinds of calls.

    record: the deployment keeps a usage record of each request, which is exact.
    read_to_end: it continues to the end and bills the whole answer, so the gateway reads on and bills the same.
    received: it stops, and bills the prompt and what it has generated until then.
    """

    name: str
    providers: frozenset[str]  # empty: by host only
    hosts: tuple[str, ...]  # a host, or the end of one with a dot before it
    stream: Means
    answer: Means

    def matches(self, provider: str, host: str) -> bool:
        """Whether the rule applies to a deployment."""
        if self.providers:
            return provider in self.providers
        return any(host == known or host.endswith(f".{known}") for known in self.hosts)


RULES = (
    DisconnectRule("every other deployment with OpenAI's API", frozenset({"openai"}), (), "received", "received"),
    DisconnectRule("the bundled engine", frozenset({"warmpath"}), (), "record", "record"),
    DisconnectRule(
        "vLLM, SGLang, TensorRT-LLM, llama.cpp", frozenset({"vllm", "sglang", "trtllm", "llamacpp"}), (),
        "received", "received",
    ),
    DisconnectRule("Anthropic's API", frozenset({"anthropic"}), (), "received", "read_to_end"),
    DisconnectRule("Ollama", frozenset({"ollama"}), (), "received", "received"),
    DisconnectRule("Azure OpenAI", frozenset({"azure"}), (), "received", "read_to_end"),
    DisconnectRule("Gemini's own API", frozenset({"gemini"}), (), "read_to_end", "read_to_end"),
    DisconnectRule(
        "OpenAI, Azure, DeepSeek, xAI, Together, Fireworks, DeepInfra, Novita, Cohere, Cloudflare", frozenset(),
        (
            "api.openai.com", "openai.azure.com", "services.ai.azure.com", "api.deepseek.com", "api.x.ai",
            "api.together.xyz", "api.together.ai", "api.fireworks.ai", "api.deepinfra.com", "api.novita.ai",
            "api.cohere.com", "api.cohere.ai", "api.cloudflare.com",
        ),
        "received", "read_to_end",
    ),
    DisconnectRule(
        "Gemini, Vertex AI, Groq, Mistral, Perplexity, SambaNova, MiniMax, AI21, Bedrock, DashScope, Nebius, "
        "Hugging Face, OpenRouter", frozenset(),
        (
            "generativelanguage.googleapis.com", "aiplatform.googleapis.com", "api.groq.com", "api.mistral.ai",
            "api.perplexity.ai", "api.sambanova.ai", "api.minimax.io", "api.minimaxi.com", "api.ai21.com",
            "amazonaws.com", "dashscope.aliyuncs.com", "dashscope-intl.aliyuncs.com", "api.studio.nebius.com",
            "router.huggingface.co", "openrouter.ai",
        ),
        "read_to_end", "read_to_end",
    ),
)  # fmt: skip


class OnDisconnect(Frozen):
    """How a call is billed if its client disconnects before the deployment has counted it. Never as 0."""

    bill: Means | None = Field(
        None,
        description="record: by the deployment's own usage record. read_to_end: the gateway reads the answer to its "
        "end and bills all of it. received: the prompt, and the text received until then. Default: the vendor's rule "
        "(docs/explanation/billing.md).",
    )
    max_time: Seconds = Field(
        30.0, description="read_to_end: longest time after the disconnect. Then the call is billed as received."
    )
    max_cost: Annotated[Decimal, Field(gt=0, max_digits=18, decimal_places=9)] = Field(
        Decimal("0.10"),
        description="read_to_end: most money, in the currency of the prices, that a stream may cost after the "
        "disconnect. Then it is billed as received. An answer that is not a stream has no price before its end.",
    )


def disconnect_rule(provider: str, base_url: str) -> DisconnectRule:
    """Return the rule of the vendor that a deployment belongs to."""
    host = (urlsplit(base_url).hostname or "").lower()
    return next((rule for rule in reversed(RULES) if rule.matches(provider, host)), RULES[0])
