"""The bundled paged-KV inference engine: an OpenAI-compatible server of its own."""
