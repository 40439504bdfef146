"""A request's body becomes a `Call`: parsed, canonicalised for prefix reuse, fingerprinted, put into a latency class.

It may import `response_store`, `prefix`, `storage`, `policy`, `types` and `core`. Begin at `canonicaliser.py`, phase 2.
"""
