import hashlib
import hmac

import pytest

from gateway.core import api_keys as keys


def test_a_new_key_can_be_parsed_and_is_unique() -> None:
    key = keys.new_key("dev_1")
    parsed = keys.parse_key(key)
    assert parsed is not None
    key_id, secret = parsed
    assert key_id == "dev_1"
    assert len(bytes.fromhex(secret)) == keys.SECRET_BYTES
    assert keys.new_key("dev_1") != key
    assert keys.parse_key(keys.new_key(keys.new_id())) is not None


def test_the_secret_may_contain_dashes_but_the_id_may_not() -> None:
    assert keys.parse_key("wp-dev-a-b_c-d") == ("dev", "a-b_c-d")


@pytest.mark.parametrize(
    "text",
    ["", "wp-", "wp-dev", "wp-dev-", "wp--x", "sk-dev-x", "wp-Dev-x", "wp-_a-x", "wp-dev-x\n", "wp-dev-é", " wp-dev-x"],
)
def test_text_without_the_form_of_a_key_is_not_parsed(text: str) -> None:
    assert keys.parse_key(text) is None


def test_an_overlong_key_is_not_parsed() -> None:
    assert keys.parse_key("wp-dev-" + "x" * 300) is None


@pytest.mark.parametrize("key_id", ["", "a-b", "A", "_a", "a" * 64])
def test_no_key_is_made_for_an_invalid_id(key_id: str) -> None:
    with pytest.raises(ValueError, match="a key id has"):
        keys.new_key(key_id)


def test_the_hash_is_an_hmac_keyed_by_the_pepper() -> None:
    expected = hmac.new(b"salt and", b"wp-dev-x", hashlib.sha256).hexdigest()
    assert keys.hash_key("wp-dev-x", "salt and") == f"hmac-sha256:{expected}"


def test_only_the_same_key_with_the_same_pepper_verifies() -> None:
    stored = keys.hash_key("wp-dev-x", "p")
    assert keys.verify("wp-dev-x", stored, "p")
    assert not keys.verify("wp-dev-y", stored, "p")
    assert not keys.verify("wp-dev-x", stored, "")
    assert not keys.verify("wp-dev-x", stored.removeprefix("hmac-sha256:"), "p")
    assert not keys.verify("wp-dev-x", "hmac-sha256:é", "p")
