"""Names of the OpenTelemetry spans and attributes that the gateway sends.

`GEN_AI_*` follow the GenAI semantic conventions (github.com/open-telemetry/semantic-conventions-genai, status
Development, read 2026-11). If a convention is being renamed, the gateway sends the old and the new name. `HTTP_*`,
`SERVER_*`, `SERVICE_*`, `URL_*` and `ERROR_TYPE` are stable conventions. `WARMPATH_*` are defined by Warmpath.
"""

from __future__ import annotations

from typing import Final

from gateway.types import Operation

# Spans. Each other phase's span has the name under which `PhaseTimings.enter` noted it.
CHAT_PHASE: Final = "chat"
SETTLE_PHASE: Final = "settle"
QUEUE_PHASE: Final = "queue"
ROUTE_PHASE: Final = "route"
REPLAY_SPAN: Final = "replay"  # an answer that came from the cache or from another call's upstream
ATTEMPT_SPAN: Final = "POST"
PREFILL_SPAN: Final = "prefill"
FIRST_CHUNK_EVENT: Final = "first_chunk"

GEN_AI_OPERATIONS: Final = {
    Operation.CHAT: "chat",
    Operation.COMPLETION: "text_completion",
    Operation.EMBEDDING: "embeddings",
    Operation.PASSED: "passed",
}
GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_STREAM: Final = "gen_ai.request.stream"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_NUMBERS: Final = {  # field of the body -> attribute; only numbers, never text
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
}
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"  # seconds
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"  # cached tokens included
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_USAGE_CACHE_WRITE: Final = (
    "gen_ai.usage.cache_creation.input_tokens",  # until 2026
    "gen_ai.usage.cache_write.input_tokens",
)
GEN_AI_USAGE_REASONING: Final = "gen_ai.usage.reasoning.output_tokens"
OPENAI_REQUEST_SERVICE_TIER: Final = "openai.request.service_tier"

ERROR_TYPE: Final = "error.type"
HTTP_REQUEST_METHOD: Final = "http.request.method"
HTTP_REQUEST_RESEND_COUNT: Final = "http.request.resend_count"
HTTP_RESPONSE_STATUS_CODE: Final = "http.response.status_code"
HTTP_ROUTE: Final = "http.route"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
SERVICE_INSTANCE_ID: Final = "service.instance.id"
SERVICE_NAME: Final = "service.name"
SERVICE_VERSION: Final = "service.version"
URL_FULL: Final = "url.full"
URL_PATH: Final = "url.path"

WARMPATH_CACHE: Final = "warmpath.cache"
WARMPATH_CALL_ID: Final = "warmpath.call_id"
WARMPATH_CANONICAL_STEPS: Final = "warmpath.canonical.steps"
WARMPATH_CLASS: Final = "warmpath.class"
WARMPATH_CLASS_RULE: Final = "warmpath.class.rule"
WARMPATH_DEPLOYMENT: Final = "warmpath.deployment"
WARMPATH_EVENT_ID: Final = "warmpath.event_id"
WARMPATH_KEY_ID: Final = "warmpath.key_id"
WARMPATH_OUTCOME: Final = "warmpath.outcome"
WARMPATH_POLICY_HASH: Final = "warmpath.policy.hash"
WARMPATH_BLOCKS_FROM: Final = "warmpath.prefix.blocks_from"
WARMPATH_PREDICTED_CACHED_TOKENS: Final = "warmpath.prefix.predicted_cached_tokens"
WARMPATH_PROMPT_TOKENS_ESTIMATE: Final = "warmpath.prompt_tokens_estimate"
WARMPATH_ROUTE_REASON: Final = "warmpath.route.reason"
WARMPATH_TENANT: Final = "warmpath.tenant"
WARMPATH_USAGE_EXACT: Final = "warmpath.usage.exact"

# Label values
OTHER: Final = "other"  # anything that the policy does not name
