"""Authentication: finds the `Principal` of a request by its API key. Also creates, rotates and revokes keys.

This package may import `storage`, `policy`, `types` and `core`. Read `authenticator.py` first, phase 1 of a request.
"""
