"""Provider for Ollama's own API: translates chats, embeddings and their answers.

Begin at `provider`. `request` translates a call, and `response` translates complete answers and streams of lines.
"""

from gateway.providers.ollama.provider import Ollama

__all__ = ["Ollama"]
