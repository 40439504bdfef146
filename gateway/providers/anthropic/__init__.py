"""Deployments that speak Anthropic's Messages API. `request` translates a call, `response` translates the answer.

Begin at `provider`. `fields` decides which fields can be translated, and `turns` translates the messages.
"""

from gateway.providers.anthropic.provider import Anthropic

__all__ = ["Anthropic"]
