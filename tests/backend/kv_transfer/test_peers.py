from __future__ import annotations

import pytest

from backend.kv_transfer.peers import Peer, is_allowed, parse_rule


@pytest.mark.parametrize(
    ("rule", "peer", "expected"),
    [
        ("engine-a", Peer("engine-a", 8000), True),
        ("Engine-A", Peer("ENGINE-a", 8000), True),
        ("engine-a", Peer("engine-a.evil.example", 8000), False),
        ("engine-a:8000", Peer("engine-a", 8000), True),
        ("engine-a:8000", Peer("engine-a", 8001), False),
        ("10.0.0.0/8", Peer("10.200.3.4", 1), True),
        ("10.0.0.0/8", Peer("11.0.0.1", 1), False),
        ("10.0.0.0/8", Peer("engine-a", 1), False),  # names are never resolved
        ("127.0.0.1", Peer("127.0.0.1", 9), True),
        ("127.0.0.1:8000", Peer("127.0.0.1", 9), False),
        ("::1", Peer("::1", 9), True),
        ("[::1]:8000", Peer("::1", 8000), True),
        ("[::1]:8000", Peer("::1", 9), False),
        ("fd00::/8", Peer("fd12::3", 9), True),
        ("fd00::/8", Peer("10.0.0.1", 9), False),
    ],
)
def test_a_rule_names_a_host_a_port_or_a_network(rule: str, peer: Peer, *, expected: bool) -> None:
    assert is_allowed(peer, [parse_rule("other.example"), parse_rule(rule)]) is expected


def test_without_rules_no_peer_is_allowed() -> None:
    assert not is_allowed(Peer("127.0.0.1", 8000), [])


@pytest.mark.parametrize("text", ["", ":8000", "engine:", "engine:x", "engine:0", "engine:70000", "10.0.0.0/99", "a/b"])
def test_what_is_no_rule_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        parse_rule(text)


def test_an_address_is_printed_as_in_a_url() -> None:
    assert [str(Peer("::1", 80)), str(Peer("a", 80))] == ["[::1]:80", "a:80"]
