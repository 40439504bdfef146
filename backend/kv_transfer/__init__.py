"""Moves blocks of the prefix cache between engines, so that a prompt computed by one need not be computed by another.

An engine serves its blocks by hash (`backend/server/kv_blocks.py`) in the format of `block_stream.py`. Another one
loads those that a request lacks (`prefix_loader.py`), from peers that its operator has named (`peers.py`). Blocks are
exchanged only between engines whose `BlockLayout` is the same. Begin at `prefix_loader.py`. This package imports
`backend.engine` and `backend.model_files`, and the server imports it.
"""
