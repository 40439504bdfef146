"""What routing and metering know of the events of API formats in which answers pass unchanged."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gateway.core.native_requests import MESSAGES, RESPONSES


class NativeAPI(msgspec.Struct, frozen=True):
    """What the gateway knows of an API format's answers."""

    opening: frozenset[str]  # types of events before the first output
    ends: frozenset[str]  # types of events that end a complete answer
    count_path: bytes  # of the endpoint that counts the tokens of a prompt
    uncounted: frozenset[str]  # fields that this endpoint does not take


NATIVE_APIS: Mapping[str, NativeAPI] = {
    MESSAGES: NativeAPI(
        opening=frozenset({"message_start", "ping"}),
        ends=frozenset({"message_stop"}),
        count_path=b"messages/count_tokens",
        uncounted=frozenset(
            {"max_tokens", "stream", "stop_sequences", "temperature", "top_p", "top_k", "metadata", "service_tier"}
        ),
    ),
    RESPONSES: NativeAPI(
        opening=frozenset({"response.created", "response.queued", "response.in_progress", "keepalive"}),
        ends=frozenset({"response.completed", "response.incomplete"}),
        count_path=b"responses/input_tokens",
        uncounted=frozenset(
            {"stream", "stream_options", "max_output_tokens", "store", "metadata", "temperature", "top_p", "include",
             "background", "service_tier", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
             "top_logprobs", "max_tool_calls"}
        ),
    ),
}  # fmt: skip
