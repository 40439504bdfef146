"""The inference engine: turns token ids into token ids, by continuous batching over a paged KV cache.

It may import `backend.models`, `layers`, `attention`, `kv_cache`, `ops`, `native`, `quantization` and `model_files`,
but not `backend.server`; scheduler, block pool and request import no torch. Begin at engine.py, whose minimal path
leads through nine files from a request to its token.
"""
