"""The bundled paged-KV inference engine: an OpenAI-compatible server of its own."""

__version__ = "0.1.0"
