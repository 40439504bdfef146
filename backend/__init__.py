"""The bundled inference engine: a paged KV cache, continuous batching and an OpenAI-compatible HTTP server.

It imports nothing from `gateway`, which knows it over HTTP only.
Begin at `backend/engine/engine.py` for the engine and at `backend/server/generation.py` for the server.
"""

__version__ = "0.1.0"
