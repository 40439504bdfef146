"""The endpoints behind /v1/: a family of wires in, and the parts that they share.

`base.py` is the port, and every endpoint is one member. `exchange.py` moves the bytes of a request and its reply, and
renders errors. `chat.py` is the simplest endpoint; `messages/` and `responses/` translate other wires to and from chat.
May import `gateway.prompts` and everything below it.
"""

from gateway.endpoints.base import Endpoint
from gateway.endpoints.chat import ChatEndpoint
from gateway.endpoints.completions import CompletionEndpoint
from gateway.endpoints.embeddings import EmbeddingEndpoint
from gateway.endpoints.messages import CountTokensEndpoint, MessagesEndpoint
from gateway.endpoints.responses import InputTokensEndpoint, ResponsesEndpoint

# Endpoints that the lines of a batch may name.
BATCH_ENDPOINTS: tuple[Endpoint, ...] = (ChatEndpoint(), CompletionEndpoint(), EmbeddingEndpoint(), ResponsesEndpoint())
ENDPOINTS: tuple[Endpoint, ...] = (*BATCH_ENDPOINTS, MessagesEndpoint())
# Endpoints that only count a prompt's tokens, and generate nothing.
COUNTING_ENDPOINTS: tuple[Endpoint, ...] = (CountTokensEndpoint(), InputTokensEndpoint())

__all__ = ["BATCH_ENDPOINTS", "COUNTING_ENDPOINTS", "ENDPOINTS"]
