from __future__ import annotations

import ipaddress

import pytest

from gateway.providers.media_fetch.addresses import is_allowed


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "64:ff9b::5db8:d822"])
def test_public_addresses_are_allowed(address: str) -> None:
    assert is_allowed(address, ())


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "::1", "::", "fe80::1%eth0", "fd00::1", "ff02::1",
        "::ffff:127.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
    ],
)  # fmt: skip
def test_private_addresses_are_refused_however_they_are_written(address: str) -> None:
    assert not is_allowed(address, ())


def test_a_named_network_is_allowed() -> None:
    networks = [ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("fd00::/8")]
    assert is_allowed("10.1.2.3", networks) and is_allowed("fd00::1", networks)
    assert not is_allowed("10.2.0.1", networks)
