"""Anthropic's Messages, behind the port of the providers: `request` words a call, `reply` what comes back."""

from gateway.providers.anthropic.provider import Anthropic

__all__ = ["Anthropic"]
