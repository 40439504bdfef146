"""Provider for deployments with Anthropic's Messages API: translates chat calls and their answers.

Begin at `provider`. `request` translates a call and `response` the answer. `fields` decides which fields can be
translated, and `turns` translates the messages.
"""

from gateway.providers.anthropic.provider import Anthropic

__all__ = ["Anthropic"]
