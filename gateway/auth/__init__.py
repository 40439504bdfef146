"""Who calls: request headers become a `Principal`; keys are created, rotated and revoked.

It may import `storage`, `policy`, `types` and `core`. Begin at `authenticator.py`, phase 1 of a request.
"""
