"""Provider for Google's native Gemini API: translates chat calls and their answers.

Begin at `provider`. `request` translates a call, and `response` translates complete answers and streams.
"""

from gateway.providers.gemini.provider import Gemini

__all__ = ["Gemini"]
