"""The doors by path behind /v1/."""

from gateway.endpoints.base import Endpoint
from gateway.endpoints.chat import ChatEndpoint
from gateway.endpoints.completions import CompletionEndpoint
from gateway.endpoints.embeddings import EmbeddingEndpoint
from gateway.endpoints.messages import CountTokensEndpoint, MessagesEndpoint
from gateway.endpoints.responses import InputTokensEndpoint, ResponsesEndpoint

# Those that the lines of batches may name.
BATCH_ENDPOINTS: tuple[Endpoint, ...] = (ChatEndpoint(), CompletionEndpoint(), EmbeddingEndpoint(), ResponsesEndpoint())
ENDPOINTS: tuple[Endpoint, ...] = (*BATCH_ENDPOINTS, MessagesEndpoint())
COUNTING_ENDPOINTS: tuple[Endpoint, ...] = (
    CountTokensEndpoint(),
    InputTokensEndpoint(),
)  # where prompts are only counted

__all__ = ["BATCH_ENDPOINTS", "COUNTING_ENDPOINTS", "ENDPOINTS"]
