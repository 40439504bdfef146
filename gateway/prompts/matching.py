"""Checks if the conditions of a policy's rule or route hold for a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.policy import Match
from gateway.policy.wildcards import names_include
from gateway.prompts.reader import ParsedBody
from gateway.types import Operation, Principal

Headers = Mapping[bytes, bytes]
TAGS_HEADER = b"x-tags"


def matches(
    match: Match, principal: Principal, operation: Operation, parsed: ParsedBody, prompt_tokens: int, headers: Headers
) -> bool:
    """Whether all conditions of a rule hold."""
    common = parsed.common
    return (
        (match.model is None or names_include(match.model, common.model))
        and (match.endpoint is None or operation in match.endpoint)
        and (match.tenant is None or principal.tenant.name in match.tenant)
        and (match.key is None or principal.key_id in match.key)
        and (match.service_tier is None or common.service_tier in match.service_tier)
        and (match.min_prompt_tokens is None or prompt_tokens >= match.min_prompt_tokens)
        and (not match.header or _has_headers(match.header, headers))
        and (not match.metadata or _has_metadata(match.metadata, common.metadata or {}))
        and (match.tag is None or not _tags(common.metadata or {}, headers).isdisjoint(match.tag))
    )


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
