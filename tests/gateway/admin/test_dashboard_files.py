"""The dashboard's files through ASGI: access, headers, and what is not served."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from starlette.types import ASGIApp

from gateway.admin.dashboard_files import CONTENT_POLICY, FOLDER, TYPES, dashboard, is_page

SECURE = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "dashboard"
    (folder / "pages").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html><title>here</title>")
    (folder / "pages" / "now.js").write_text("export const now = 1;")
    (folder / "style.css").write_text("body { margin: 0 }")
    (folder / "notes.txt").write_text("for us")
    (tmp_path / "secret.html").write_text("not for you")
    return folder


async def get(app: ASGIApp, path: str, *, method: str = "GET", **headers: str) -> httpx2.Response:
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://admin") as client:
        return await client.request(method, path, headers={name.replace("_", "-"): v for name, v in headers.items()})


@pytest.mark.parametrize("path", ["/", "/dashboard"])
async def test_redirects_to_the_page(folder: Path, path: str) -> None:
    reply = await get(dashboard(folder), path)
    assert (reply.status_code, reply.headers["location"]) == (307, "/dashboard/")
    assert SECURE.items() <= dict(reply.headers).items()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/dashboard/", "text/html; charset=utf-8"),
        ("/dashboard/index.html", "text/html; charset=utf-8"),
        ("/dashboard/pages/now.js", "text/javascript; charset=utf-8"),
        ("/dashboard/style.css", "text/css; charset=utf-8"),
    ],
)
async def test_files_have_their_type_and_a_content_security_policy(folder: Path, path: str, kind: str) -> None:
    reply = await get(dashboard(folder), path)
    name = path.removeprefix("/dashboard/") or "index.html"
    assert (reply.status_code, reply.text) == (200, (folder / name).read_text())
    assert reply.headers["content-type"] == kind
    assert SECURE.items() <= dict(reply.headers).items()


async def test_a_file_is_sent_again_if_it_has_changed(folder: Path) -> None:
    app = dashboard(folder)
    tag = (await get(app, "/dashboard/style.css")).headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}'):
        same = await get(app, "/dashboard/style.css", if_none_match=known)
        assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
        assert SECURE.items() <= dict(same.headers).items()
    (folder / "style.css").write_text("body { margin: 1 }")  # as many bytes
    changed = await get(app, "/dashboard/style.css", if_none_match=tag)
    assert (changed.status_code, changed.text) == (200, "body { margin: 1 }")


@pytest.mark.parametrize(
    "path",
    [
        "/dashboard/none.js", "/dashboard/notes.txt", "/dashboard/pages", "/dashboard/pages/",
        "/dashboard/../secret.html", "/dashboard/%2e%2e/secret.html", "/dashboard/..%2fsecret.html",
        "/dashboard//index.html", "/dashboard/" + "x" * 5000,
    ],
)  # fmt: skip
async def test_other_files_are_not_served(folder: Path, path: str) -> None:
    reply = await get(dashboard(folder), path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_url")
    assert len(reply.content) < 400


async def test_only_get_is_allowed(folder: Path) -> None:
    assert (await get(dashboard(folder), "/dashboard/", method="POST")).status_code == 405


@pytest.mark.parametrize("path", ["/admin/keys", "/admin/state", "/dashboards", "/v1/organization/costs", "//", ""])
def test_other_paths_belong_to_the_api(path: str) -> None:
    assert not is_page(path)


def test_the_package_contains_the_page_and_all_its_files() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert FOLDER / "index.html" in files
    assert {path.suffix for path in files} <= TYPES.keys()
    assert "unsafe" not in CONTENT_POLICY
