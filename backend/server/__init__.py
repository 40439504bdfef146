"""HTTP server of the engine: OpenAI's and vLLM's API in front of `AsyncEngine`.

It imports the engine, `backend.parsers` and `backend.model_files`; nothing but `backend.__main__` imports it.
Begin at `generation.py`, which runs a request through the engine, then at `chat.py`, an endpoint that uses it.
"""
