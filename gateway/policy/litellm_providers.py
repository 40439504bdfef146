"""Which provider a policy uses for each vendor that LiteLLM's configuration names, and what replaces its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Vendor(NamedTuple):
    """A vendor: the provider of its API, its base URL, the variable of its key, and what is added to a base URL."""

    provider: str
    base_url: str | None = None  # None: the file must have it
    key: str | None = None
    path: str = ""  # that a base URL must end with, and that LiteLLM adds itself

    def url(self, given: str) -> str:
        """Return a base URL of LiteLLM's configuration as a policy has it."""
        plain = given.rstrip("/")
        return plain if plain.endswith(self.path) else plain + self.path


def _hosted(base_url: str, key: str) -> Vendor:
    return Vendor("openai", base_url, key)


_LOCAL = Vendor("openai")
PROVIDERS: Mapping[str, Vendor] = {
    "openai": _hosted("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "text-completion-openai": _hosted("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "azure": Vendor("azure", key="AZURE_API_KEY"),
    "azure_text": Vendor("azure", key="AZURE_API_KEY"),
    "azure_ai": Vendor("openai", key="AZURE_AI_API_KEY"),
    "anthropic": Vendor("anthropic", "https://api.anthropic.com/v1", "ANTHROPIC_API_KEY", "/v1"),
    "gemini": Vendor("gemini", "https://generativelanguage.googleapis.com/v1beta", "GEMINI_API_KEY"),
    "ollama": Vendor("ollama", "http://localhost:11434", path="/api"),
    "ollama_chat": Vendor("ollama", "http://localhost:11434", path="/api"),
    "hosted_vllm": Vendor("vllm"),
    "vllm": Vendor("vllm"),
    "groq": _hosted("https://api.groq.com/openai/v1", "GROQ_API_KEY"),
    "mistral": _hosted("https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
    "codestral": _hosted("https://codestral.mistral.ai/v1", "CODESTRAL_API_KEY"),
    "deepseek": _hosted("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
    "openrouter": _hosted("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "together_ai": _hosted("https://api.together.xyz/v1", "TOGETHERAI_API_KEY"),
    "fireworks_ai": _hosted("https://api.fireworks.ai/inference/v1", "FIREWORKS_AI_API_KEY"),
    "xai": _hosted("https://api.x.ai/v1", "XAI_API_KEY"),
    "perplexity": _hosted("https://api.perplexity.ai", "PERPLEXITYAI_API_KEY"),
    "nvidia_nim": _hosted("https://integrate.api.nvidia.com/v1", "NVIDIA_NIM_API_KEY"),
    "cerebras": _hosted("https://api.cerebras.ai/v1", "CEREBRAS_API_KEY"),
    "sambanova": _hosted("https://api.sambanova.ai/v1", "SAMBANOVA_API_KEY"),
    "deepinfra": _hosted("https://api.deepinfra.com/v1/openai", "DEEPINFRA_API_KEY"),
    "moonshot": _hosted("https://api.moonshot.ai/v1", "MOONSHOT_API_KEY"),
    "dashscope": _hosted("https://dashscope-intl.aliyuncs.com/compatible-mode/v1", "DASHSCOPE_API_KEY"),
    "litellm_proxy": Vendor("openai", key="LITELLM_PROXY_API_KEY"),
    "openai_like": _LOCAL,
    "custom_openai": _LOCAL,
    "lm_studio": _LOCAL,
    "llamafile": _LOCAL,
    "xinference": _LOCAL,
    "databricks": Vendor("openai", key="DATABRICKS_API_KEY"),
    "github": _hosted("https://models.github.ai/inference", "GITHUB_API_KEY"),
}

# Fields of a request that `litellm_params` may set for clients that do not.
CHAT_FIELDS = frozenset(
    {"temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "seed", "stop", "presence_penalty",
     "frequency_penalty", "reasoning_effort", "thinking", "response_format", "tools", "tool_choice", "logit_bias",
     "parallel_tool_calls", "service_tier", "user"}
)  # fmt: skip

_CLASSES = "set the bounds of `classes` in the policy"
_ALWAYS = "metrics, traces and receipts are always there: docs/how-to/observe.md"
_KEYS = "create keys with `warmpath keys`"
_STORAGE = "set WARMPATH_STORAGE"
# What to do instead of a setting, by the setting's name.
REPLACEMENTS: Mapping[str, str] = {
    "timeout": _CLASSES,
    "stream_timeout": _CLASSES,
    "request_timeout": _CLASSES,
    "num_retries": "the gateway makes four attempts at most: docs/explanation/reliability.md",
    "max_retries": "the gateway makes four attempts at most: docs/explanation/reliability.md",
    "retry_policy": "the gateway makes four attempts at most: docs/explanation/reliability.md",
    "allowed_fails": "a circuit breaker ejects failing deployments: docs/explanation/reliability.md",
    "cooldown_time": "a circuit breaker ejects failing deployments: docs/explanation/reliability.md",
    "routing_strategy": "`routing` of the policy; by default by the predicted time, which knows prefix caches",
    "enable_pre_call_checks": "prompts that are too long go to `fallbacks_when.context`",
    "drop_params": "name fields that a server rejects in the deployment's `leave_out`",
    "cache": "set `cache` of the policy",
    "cache_params": "set `cache` of the policy",
    "callbacks": _ALWAYS,
    "success_callback": _ALWAYS,
    "failure_callback": _ALWAYS,
    "service_callback": _ALWAYS,
    "alerting": "use the alerts of docs/how-to/alerts.md",
    "set_verbose": "set WARMPATH_LOG_LEVEL",
    "redis_host": _STORAGE,
    "redis_port": _STORAGE,
    "redis_password": _STORAGE,
    "redis_url": _STORAGE,
    "master_key": f"{_KEYS}, and a key of the admin API with `warmpath admin-keys`",
    "database_url": f"{_STORAGE}; receipts are in the ledger, without a database",
    "max_budget": "set `budget` in a tenant's limits",
    "budget_duration": "set `budget` in a tenant's limits",
    "default_team_settings": "make a tenant for each team",
    "pass_through_endpoints": "list paths in `passthrough` of the policy",
    "guardrails": "a policy has no guardrails",
    "mcp_servers": "the gateway speaks to no MCP servers",
    "credential_list": "write a secret into each deployment's `api_key`",
    "tags": "use `model_routes` with tags",
    "max_parallel_requests": "set `concurrency` in a tenant's limits",
    "vertex_project": "serve Vertex by LiteLLM behind the gateway",
    "mock_response": "the gateway invents no answers",
}
