"""The gateway: one OpenAI-compatible URL in front of many inference servers."""

__version__ = "0.1.0"
