"""Replays recorded or generated traffic through the gateway's own router and cache models, in virtual time."""
