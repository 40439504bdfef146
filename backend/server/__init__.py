"""The engine's HTTP face: OpenAI's wire in front of `AsyncEngine`. Start at `generation.py`, then `chat.py`, a door."""
