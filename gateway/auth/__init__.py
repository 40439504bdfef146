"""Authentication: finds the `Principal` of a request by its API key. Also creates, rotates and revokes keys.

People who use the dashboard sign in through an OpenID Connect provider (`sessions.py`). This package may import
`providers`, `storage`, `policy`, `types` and `core`. Read `authenticator.py` first, phase 1 of a request.
"""
