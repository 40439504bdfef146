"""The dashboard's port and key in `warmpath up`. `tests/e2e/test_up.py` runs the command itself."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from gateway.cli import up
from gateway.cli.port_owner import next_free_port, port_owner
from gateway.settings import UpSettings
from tests.gateway.calls import a_policy
from tests.gateway.cli.conftest import Warmpath
from tests.ports import free_port


def settings(folder: Path, **given: Any) -> UpSettings:
    return UpSettings.model_validate({"data_dir": folder, **given})


@pytest.fixture
def usual_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A default port other than 8082, which may be in use here, taken by another socket."""
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        monkeypatch.setattr(up, "ADMIN_PORT", taken.getsockname()[1])
        yield taken


def test_the_default_dashboard_port_is_used_if_it_is_free(tmp_path: Path, usual_port: socket.socket) -> None:
    usual_port.close()
    given, listener = up._with_dashboard(settings(tmp_path), a_policy())
    with listener or contextlib.nullcontext():
        assert given.admin_port == up.ADMIN_PORT
        assert given.admin_key is not None
        key = given.admin_key.get_secret_value()
        assert key == (tmp_path / "admin-key").read_text().strip() and key.startswith("wpa-")
        assert (tmp_path / "admin-key").stat().st_mode & 0o077 == 0
        assert up._dashboard_url(given, listener) == f"http://127.0.0.1:{up.ADMIN_PORT}/#key={key}"


def test_there_is_no_dashboard_if_the_default_port_is_taken(
    tmp_path: Path, usual_port: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    given, listener = up._with_dashboard(settings(tmp_path), a_policy())
    assert (given.admin_port, listener, up._dashboard_url(given, listener)) == (None, None, None)
    assert capsys.readouterr().err == (
        f"warning: no dashboard: cannot listen on 127.0.0.1:{up.ADMIN_PORT}: Address already in use; "
        "set WARMPATH_ADMIN_PORT to another port\n"
    )


@pytest.mark.parametrize("by", ["gateway", "engine"])
def test_there_is_no_dashboard_if_the_gateway_or_an_engine_uses_the_default_port(
    tmp_path: Path, usual_port: socket.socket, by: str
) -> None:
    port = up.ADMIN_PORT
    usual_port.close()
    servers = [{"name": "a", "provider": "warmpath", "base_url": f"http://localhost:{port}/v1", "model": "served"}]
    policy = a_policy() if by == "gateway" else a_policy(deployments=[*servers, {**servers[0], "name": "b"}])
    asked = {"port": port} if by == "gateway" else {}
    assert up._with_dashboard(settings(tmp_path, **asked), policy)[1] is None


def test_a_configured_dashboard_port_that_is_taken_is_an_error(tmp_path: Path, usual_port: socket.socket) -> None:
    with pytest.raises(typer.Exit) as ended:
        up._with_dashboard(settings(tmp_path, admin_port=up.ADMIN_PORT), a_policy())
    assert ended.value.exit_code == 2


def test_an_invalid_key_file_is_reported(
    tmp_path: Path, usual_port: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "admin-key").write_text("short\n")
    with pytest.raises(typer.Exit):
        up._with_dashboard(settings(tmp_path, admin_port=0), a_policy())
    assert "admin-key does not contain a key; delete it" in capsys.readouterr().err


@contextlib.contextmanager
def a_server(body: bytes) -> Iterator[str]:
    """A server that answers every GET with this body. Yields its root URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def models(owner: str, *names: str) -> bytes:
    return json.dumps({"data": [{"id": name, "owned_by": owner} for name in names]}).encode()


def test_only_our_engine_with_our_model_is_used() -> None:
    with a_server(models("warmpath", "demo")) as root:
        assert (owner := port_owner(root, "demo")) and owner.is_our_engine
        assert (owner := port_owner(root, "large")) and not owner.is_our_engine
        assert "an engine that serves demo instead of large" in owner.description
        assert f"process {os.getpid()} (" in owner.description
    assert port_owner(root, "demo") is None, "nothing listens any more"


@pytest.mark.parametrize("body", [b"ok", b"{}", b'{"data": [1]}', models("vllm", "demo")])
def test_another_server_with_status_200_is_not_used(body: bytes) -> None:
    with a_server(body) as root:
        assert (owner := port_owner(root, "demo")) and not owner.is_our_engine
        assert "which is not the bundled engine" in owner.description


def test_up_names_the_owner_of_the_engines_port_and_a_free_port(warmpath: Warmpath, tmp_path: Path) -> None:
    with a_server(b"ok") as root:
        port = int(root.rpartition(":")[2])
        policy = tmp_path / "policy.yaml"
        policy.write_text(UpSettings().policy.read_text().replace("127.0.0.1:8081", f"127.0.0.1:{port}"))
        result = warmpath("up", "--policy", str(policy), "--port", "0", WARMPATH_ADMIN_PORT="0")
    assert result.exit_code == 2
    assert f"port {port} of the engine is taken by process {os.getpid()} (" in result.stderr
    assert f"to port {next_free_port(port)}, which is free" in result.stderr


def test_a_data_folder_that_cannot_be_written_is_one_sentence(warmpath: Warmpath, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "data"):
        result = warmpath("up", WARMPATH_DATA_DIR=str(folder))
        assert result.exit_code == 2
        assert result.stderr.startswith(f"cannot write to the data folder {folder}: ")
        assert len(result.stderr.splitlines()) == 1
