"""The bundled inference engine: a paged KV cache, continuous batching and an OpenAI-compatible HTTP server.

This package imports nothing from `gateway`: the gateway and the engine communicate over HTTP only.
To read the code, begin at `backend/engine/engine.py` for the engine and `backend/server/generation.py` for the server.
"""

__version__ = "0.1.0"
