"""Checks if the conditions of a policy's rule or route hold for a call.

`Conditions` is made once per policy and has only the conditions that the policy states. Looking them up in the
policy's model for each call would take longer than checking them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from gateway.policy import Match
from gateway.policy.wildcards import names_include
from gateway.prompts.reader import ParsedBody
from gateway.types import Operation, Principal

Headers = Mapping[bytes, bytes]
TAGS_HEADER = b"x-tags"


class MatchedCall(msgspec.Struct, frozen=True):
    """The properties of a call that conditions check."""

    principal: Principal
    operation: Operation
    parsed: ParsedBody
    prompt_tokens: int
    headers: Headers


class Conditions:
    """The conditions of one rule or route."""

    def __init__(self, match: Match) -> None:
        self._checks = tuple(_checks(match))

    def hold(self, call: MatchedCall) -> bool:
        """Whether all conditions hold."""
        for check in self._checks:  # noqa: SIM110 (a generator takes longer)
            if not check(call):
                return False
        return True


def _checks(match: Match) -> Iterator[Callable[[MatchedCall], bool]]:
    if (models := match.model) is not None:
        yield lambda call: names_include(models, call.parsed.common.model)
    if (endpoints := match.endpoint) is not None:
        yield lambda call: call.operation in endpoints
    if (tenants := match.tenant) is not None:
        yield lambda call: call.principal.tenant_name in tenants
    if (keys := match.key) is not None:
        yield lambda call: call.principal.key_id in keys
    if (tiers := match.service_tier) is not None:
        yield lambda call: call.parsed.common.service_tier in tiers
    if (least_tokens := match.min_prompt_tokens) is not None:
        yield lambda call: call.prompt_tokens >= least_tokens
    if wanted := match.header:
        yield lambda call: _has_headers(wanted, call.headers)
    if metadata := match.metadata:
        yield lambda call: _has_metadata(metadata, call.parsed.common.metadata or {})
    if (tags := match.tag) is not None:
        yield lambda call: not _tags(call.parsed.common.metadata or {}, call.headers).isdisjoint(tags)


def _tags(metadata: Mapping[str, Any], headers: Headers) -> set[str]:
    """The tags of a call: of its metadata, which may be a list or a text with commas, and of its header."""
    listed = metadata.get("tags")
    texts = listed if isinstance(listed, list) else [listed] if isinstance(listed, str) else []
    texts = [*(text for text in texts if isinstance(text, str)), headers.get(TAGS_HEADER, b"").decode("latin-1")]
    return {tag.strip() for text in texts for tag in text.split(",")} - {""}


def _has_headers(wanted: Mapping[str, str], headers: Headers) -> bool:
    return all(headers.get(name.encode()) == value.encode() for name, value in wanted.items())


def _has_metadata(wanted: Mapping[str, str], metadata: Mapping[str, Any]) -> bool:
    return all(str(metadata.get(name)) == value for name, value in wanted.items())
