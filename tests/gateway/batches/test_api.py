import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette

from gateway.batches import uploads as uploads_module
from gateway.batches.api import BatchApi
from gateway.batches.stores.base import CHUNK_BYTES
from gateway.batches.worker import BatchWorker
from gateway.endpoints.replies import EXCEPTION_HANDLERS
from tests.gateway.batches.bench import Bench, a_bench
from tests.gateway.batches.test_lines import raw
from tests.gateway.harness import KEY, PATIENCE_SECONDS

MAX_FILE_BYTES = 3 * CHUNK_BYTES


@asynccontextmanager
async def an_api(directory: Path, **changes: Any) -> AsyncIterator[tuple[httpx2.AsyncClient, Bench]]:
    """A client of the routes. No worker runs the batches."""
    async with a_bench(directory, **changes) as bench:
        components = bench.rig.components
        api = BatchApi(
            components.authenticator, components.policies, bench.store, BatchWorker(bench.runtime),
            max_file_bytes=MAX_FILE_BYTES, max_line_bytes=components.max_body_bytes,
        )  # fmt: skip
        app = Starlette(routes=api.routes(), exception_handlers=EXCEPTION_HANDLERS)
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app), base_url="http://x/v1", headers=headers, timeout=PATIENCE_SECONDS
        ) as client:
            yield client, bench


async def upload(client: httpx2.AsyncClient, content: bytes, **fields: str) -> httpx2.Response:
    return await client.post("files", data={"purpose": "batch", **fields}, files={"file": ("in.jsonl", content)})


def message(reply: httpx2.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["message"]


async def test_a_file_is_written_to_the_store_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with an_api(tmp_path) as (client, bench):
        sizes: list[int] = []
        append = bench.store.append

        async def noting(content: str, chunk: bytes) -> None:
            sizes.append(len(chunk))
            await append(content, chunk)

        monkeypatch.setattr(bench.store, "append", noting)
        line = raw(body={"model": "m", "messages": [{"role": "user", "content": "x" * 8000}]}).replace(
            b'"a"', b'"%04d"'
        )
        content = b"\n".join(line % number for number in range(70))
        shown = (await upload(client, content)).json()
        assert sizes == [CHUNK_BYTES, CHUNK_BYTES, len(content) - 2 * CHUNK_BYTES]
        assert (shown["bytes"], shown["filename"], shown["status"]) == (len(content), "in.jsonl", "processed")
        assert (await client.get(f"files/{shown['id']}/content")).content == content


async def test_a_rejected_file_is_not_stored(tmp_path: Path) -> None:
    async with an_api(tmp_path, batches={"max_lines": 5, "max_stored_bytes": "1k"}) as (client, bench):
        too_big = raw() + b"\n" + b"\n" * (MAX_FILE_BYTES + 2 * 65536)
        assert message(await upload(client, too_big)) == (413, f"a file may have at most {MAX_FILE_BYTES} bytes")
        status, error = message(await upload(client, b"\n".join([raw()] * 6)))
        assert (status, error) == (400, "line 6: a file may have at most 5 lines")
        assert (await upload(client, raw())).status_code == 200
        status, error = message(await upload(client, raw(custom_id="b" * 900)))
        assert (status, "may have at most 1000 bytes in total" in error) == (413, True)
        assert len((await client.get("files")).json()["data"]) == 1
        stored = [row async for row in contents(bench)]
        assert len(stored) == 1


async def contents(bench: Bench) -> AsyncIterator[str]:
    """Yield the ids of all contents in the store."""
    for (file,) in await bench.store._do(lambda db: db.execute("SELECT DISTINCT file FROM contents").fetchall()):
        yield file


@pytest.mark.parametrize(
    ("fields", "message_part"),
    [
        ({"purpose": "vision"}, "purpose: must be batch"),
        ({"colour": "red"}, "the form has an unknown field 'colour'"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}, "must be a whole number from 3600"),
        ({"expires_after[seconds]": "5000"}, "the anchor must be created_at"),
        ({"long": "x" * 5000}, "the field 'long' is too long"),
    ],
)
async def test_form_fields_are_checked_by_name(tmp_path: Path, fields: dict[str, str], message_part: str) -> None:
    async with an_api(tmp_path) as (client, _):
        status, error = message(await upload(client, raw(), **fields))
        assert (status, message_part in error) == (400, True), error


async def test_a_file_for_another_purpose_is_rejected_before_its_lines_are_read(tmp_path: Path) -> None:
    async with an_api(tmp_path) as (client, _):
        error = message(await upload(client, b'{"messages": []}\n', purpose="fine-tune"))
        assert error == (400, "purpose: must be batch, not 'fine-tune'")


async def test_an_invalid_form_is_rejected(tmp_path: Path) -> None:
    async with an_api(tmp_path) as (client, _):
        kind = {"content-type": "multipart/form-data; boundary=b"}
        for content, headers in [
            (b"{}", {"content-type": "application/json"}),
            (b"no form", kind),
            (b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\ncut', kind),
            (b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n', kind),
        ]:
            reply = await client.post("files", content=content, headers=headers)
            assert reply.status_code == 400, reply.text


async def test_a_stalled_upload_is_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads_module, "STALL_SECONDS", 0.01)

    async def stalls() -> AsyncIterator[bytes]:
        yield b"--b\r\n"
        await asyncio.Event().wait()

    async with an_api(tmp_path) as (client, _):
        kind = {"content-type": "multipart/form-data; boundary=b"}
        reply = await client.post("files", content=stalls(), headers=kind)
        assert reply.status_code == 408


async def test_a_file_may_set_its_own_expiry(tmp_path: Path) -> None:
    async with an_api(tmp_path) as (client, _):
        given = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}
        shown = (await upload(client, raw(), **given)).json()
        assert shown["expires_at"] - shown["created_at"] == 7200


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"completion_window": "25h"}, "completion_window"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
async def test_an_invalid_batch_is_rejected_with_the_name_of_its_field(
    tmp_path: Path, changes: dict[str, Any], param: str
) -> None:
    async with an_api(tmp_path) as (client, _):
        file = (await upload(client, raw())).json()
        wanted = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        reply = await client.post("batches", content=json.dumps({**wanted, **changes}).encode())
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_a_tenant_may_have_at_most_max_open_batches(tmp_path: Path) -> None:
    async with an_api(tmp_path, batches={"max_open": 1}) as (client, _):
        file = (await upload(client, raw())).json()
        wanted = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        first = await client.post("batches", json=wanted)
        assert (first.status_code, (await client.post("batches", json=wanted)).status_code) == (200, 409)
        assert (await client.delete(f"files/{file['id']}")).status_code == 409
        assert (await client.post(f"batches/{first.json()['id']}/cancel")).json()["status"] == "cancelling"
        for path in ("batches?limit=0", "batches?limit=101", "files?order=up", "files?limit=x"):
            assert (await client.get(path)).status_code == 400
        assert (await client.get("batches/batch_none")).status_code == 404
        wrong_key = {"authorization": "Bearer wp-dev-ffffffffffffffff"}
        assert (await client.get("batches", headers=wrong_key)).status_code == 401
