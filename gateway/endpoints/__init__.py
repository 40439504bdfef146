"""The API endpoints under /v1/: chat, completions, embeddings, Anthropic's Messages API and OpenAI's Responses API.

`base.py` defines the interface that every endpoint implements. `exchange.py` reads a request and sends its reply or
error. `chat.py` is the simplest endpoint. `messages/` and `responses/` translate other API formats to and from chat.
This package may import `gateway.prompts` and everything below it.
"""

from gateway.endpoints.base import Endpoint
from gateway.endpoints.chat import ChatEndpoint
from gateway.endpoints.completions import CompletionEndpoint
from gateway.endpoints.embeddings import EmbeddingEndpoint
from gateway.endpoints.messages import CountTokensEndpoint, MessagesEndpoint
from gateway.endpoints.passed import PassedEndpoint, passed_endpoints
from gateway.endpoints.responses import InputTokensEndpoint, ResponsesEndpoint
from gateway.endpoints.responses.compaction import CompactEndpoint

# Endpoints that the requests of a batch may use.
BATCH_ENDPOINTS: tuple[Endpoint, ...] = (ChatEndpoint(), CompletionEndpoint(), EmbeddingEndpoint(), ResponsesEndpoint())
ENDPOINTS: tuple[Endpoint, ...] = (*BATCH_ENDPOINTS, MessagesEndpoint(), CompactEndpoint())
# Endpoints that only count the tokens of a prompt and generate no answer.
COUNTING_ENDPOINTS: tuple[Endpoint, ...] = (CountTokensEndpoint(), InputTokensEndpoint())

# Endpoints whose requests pass unchanged, by the client's path. The policy may list further ones.
PASSED_ENDPOINTS: tuple[PassedEndpoint, ...] = passed_endpoints()

__all__ = ["BATCH_ENDPOINTS", "COUNTING_ENDPOINTS", "ENDPOINTS", "PASSED_ENDPOINTS", "PassedEndpoint"]
