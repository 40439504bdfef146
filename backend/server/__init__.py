"""HTTP server of the engine: serves OpenAI's and vLLM's API and passes requests to `AsyncEngine`.

This package imports the engine, `backend.parsers` and `backend.model_files`. Only `backend.__main__` imports it. Begin
at `generation.py`, which runs a request through the engine. Then read `chat.py`, an endpoint that uses it.
"""
