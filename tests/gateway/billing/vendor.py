"""A scripted vendor's usage and cost APIs, in the formats that OpenAI and Anthropic document.

https://platform.openai.com/docs/api-reference/usage and https://platform.claude.com/docs/en/manage-claude/usage-cost-api
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import httpx2

ADMIN_KEY = "sk-admin-scripted"
DAYS_PER_PAGE = 2


class Day:
    """What a vendor has counted and billed on a day, by section (a project or workspace)."""

    def __init__(self, uncached: int, cached: int, written: int, output: int, dollars: str) -> None:
        self.uncached, self.cached, self.written, self.output, self.dollars = uncached, cached, written, output, dollars


class ScriptedVendor:
    """Answers for both vendors. `days` has what was billed: days as in 2026-11-20, and sections. Counts requests."""

    def __init__(self, days: Mapping[str, Mapping[str, Day]]) -> None:
        self.days = days
        self.requests: list[str] = []

    def transport(self) -> httpx2.MockTransport:
        def answer(request: httpx2.Request) -> httpx2.Response:
            status, body = self.answer(request.url.path, request.url.query.decode(), dict(request.headers))
            return httpx2.Response(status, json=body)

        return httpx2.MockTransport(answer)

    def answer(self, path: str, query: str, headers: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
        self.requests.append(f"{path}?{query}")
        known = parse_qs(query)
        keys = {headers.get("x-api-key"), headers.get("authorization", "").removeprefix("Bearer ")}
        if ADMIN_KEY not in keys:
            return 401, {"error": {"type": "authentication_error", "message": "invalid key"}}
        if path.startswith("/v1/organization/"):
            since, until = (datetime.fromtimestamp(int(known[name][0]), UTC) for name in ("start_time", "end_time"))
            kept = known.get("project_ids")
            bucket = {"completions": _completions, "embeddings": _embeddings, "costs": _costs}[path.rpartition("/")[2]]
        else:
            assert headers["anthropic-version"] == "2023-06-01"
            since, until = (datetime.fromisoformat(known[name][0]) for name in ("starting_at", "ending_at"))
            kept = known.get("workspace_ids[]")
            bucket = {"messages": _messages, "cost_report": _cost_report}[path.rpartition("/")[2]]
            if bucket is _cost_report:
                assert kept is None and known["group_by[]"] == ["workspace_id"], "the report has no such filter"
        assert known["bucket_width"] == ["1d"] and 1 <= int(known["limit"][0]) <= 180
        begin = int(known.get("page", ["page_0"])[0].removeprefix("page_"))
        count = (until - since).days
        ends = min(count, begin + min(DAYS_PER_PAGE, int(known["limit"][0])))
        data = []
        for number in range(begin, ends):
            start = since + timedelta(days=number)
            sections = self.days.get(start.date().isoformat(), {})
            shown = {name: day for name, day in sections.items() if kept is None or name in kept}
            data.append(bucket(start, shown))
        more = ends < count
        return 200, {"object": "page", "data": data, "has_more": more, "next_page": f"page_{ends}" if more else None}


def _openai_bucket(start: datetime, results: list[dict[str, Any]]) -> dict[str, Any]:
    first = int(start.timestamp())
    return {"object": "bucket", "start_time": first, "end_time": first + 86_400, "results": results}


def _completions(start: datetime, sections: Mapping[str, Day]) -> dict[str, Any]:
    unknown = dict.fromkeys(("project_id", "user_id", "api_key_id", "model", "batch"))
    return _openai_bucket(
        start,
        [
            {
                "object": "organization.usage.completions.result", "num_model_requests": 1, **unknown,
                "input_tokens": day.uncached + day.written + day.cached, "input_cached_tokens": day.cached,
                "output_tokens": day.output, "input_audio_tokens": 0, "output_audio_tokens": 0,
            }
            for day in sections.values()
        ],
    )  # fmt: skip


def _embeddings(start: datetime, sections: Mapping[str, Day]) -> dict[str, Any]:
    result = {"object": "organization.usage.embeddings.result", "input_tokens": 0, "num_model_requests": 0}
    return _openai_bucket(start, [result] * bool(sections))


def _costs(start: datetime, sections: Mapping[str, Day]) -> dict[str, Any]:
    return _openai_bucket(
        start,
        [
            {
                "object": "organization.costs.result", "line_item": None, "project_id": None,
                "amount": {"value": float(day.dollars), "currency": "usd"},
            }
            for day in sections.values()
        ],
    )  # fmt: skip


def _anthropic_bucket(start: datetime, results: list[dict[str, Any]]) -> dict[str, Any]:
    text, end = (f"{each:%Y-%m-%dT%H:%M:%SZ}" for each in (start, start + timedelta(days=1)))
    return {"starting_at": text, "ending_at": end, "results": results}


def _messages(start: datetime, sections: Mapping[str, Day]) -> dict[str, Any]:
    unknown = dict.fromkeys(("api_key_id", "workspace_id", "model", "service_tier", "context_window"))
    return _anthropic_bucket(
        start,
        [
            {
                **unknown, "uncached_input_tokens": day.uncached, "cache_read_input_tokens": day.cached,
                "cache_creation": {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": day.written},
                "output_tokens": day.output, "server_tool_use": {"web_search_requests": 0},
            }
            for day in sections.values()
        ],
    )  # fmt: skip


def _cost_report(start: datetime, sections: Mapping[str, Day]) -> dict[str, Any]:
    unknown = dict.fromkeys(("cost_type", "context_window", "description", "model", "service_tier", "token_type"))
    return _anthropic_bucket(
        start,
        [
            {**unknown, "currency": "USD", "amount": f"{float(day.dollars) * 100:.6f}", "workspace_id": name}
            for name, day in sections.items()
        ],
    )


@contextmanager
def served(vendor: ScriptedVendor) -> Iterator[str]:
    """Serve a vendor's APIs. Yields their base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            status, body = vendor.answer(path, query, {name.lower(): value for name, value in self.headers.items()})
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()
