"""The dashboard's port and key in `warmpath up`. `tests/e2e/test_up.py` runs the command itself."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from gateway.cli import up
from gateway.settings import UpSettings
from tests.gateway.calls import a_policy


def settings(folder: Path, **given: Any) -> UpSettings:
    return UpSettings.model_validate({"data_dir": folder, **given})


@pytest.fixture
def usual_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A default port other than 8082, which may be in use here, taken by another socket."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
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
