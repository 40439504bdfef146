"""Phase 2: turns a request body into a `Call`: parsed, canonicalised for prefix reuse, fingerprinted, classified.

It may import `response_store`, `prefix`, `storage`, `policy`, `types` and `core`. Begin at `canonicaliser.py`.
"""
