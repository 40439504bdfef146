"""ID tokens: which ones are accepted."""

from __future__ import annotations

from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, KeySet, OctKey, OKPKey, RSAKey

from gateway.auth.id_tokens import InvalidToken, UnknownKey, verify_id_token

NOW = 1_795_132_800.0
RSA = RSAKey.generate_key(2048, {"kid": "r", "use": "sig"})
EC = ECKey.generate_key("P-256", {"kid": "e"})
ED = OKPKey.generate_key("Ed25519", {"kid": "o"})
PUBLIC = KeySet([RSA, EC, ED]).as_dict(private=False)
CLAIMS = {"iss": "https://idp", "aud": "me", "sub": "ada", "nonce": "n", "exp": NOW + 300, "iat": NOW}


def token(key: Any = RSA, algorithm: str = "RS256", **changes: Any) -> str:
    claims = {name: value for name, value in {**CLAIMS, **changes}.items() if value is not None}
    return jwt.encode({"alg": algorithm, "kid": key.kid}, claims, key, algorithms=[algorithm])


def verified(text: str, keys: Any = PUBLIC) -> dict[str, Any]:
    return verify_id_token(text, keys, issuer="https://idp", client_id="me", nonce="n", now=NOW)


@pytest.mark.parametrize(("key", "algorithm"), [(RSA, "RS256"), (RSA, "PS512"), (EC, "ES256"), (ED, "Ed25519")])
def test_signatures_with_public_keys_are_accepted(key: Any, algorithm: str) -> None:
    assert verified(token(key, algorithm)) == CLAIMS


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"iss": "https://idp/"}, "issuer"),
        ({"iss": None}, "issuer"),
        ({"aud": "you"}, "another client"),
        ({"aud": ["you", "them"]}, "another client"),
        ({"aud": None}, "another client"),
        ({"aud": ["me", "you"]}, "issued to another client"),
        ({"aud": ["me", "you"], "azp": "you"}, "issued to another client"),
        ({"azp": "you"}, "issued to another client"),
        ({"nonce": "m"}, "another sign-in"),
        ({"nonce": None}, "another sign-in"),
        ({"sub": None}, "no subject"),
        ({"sub": ""}, "no subject"),
        ({"exp": NOW - 61}, "expired"),
        ({"exp": None}, "expired"),
        ({"iat": NOW + 61}, "future"),
        ({"iat": None}, "future"),
    ],
)
def test_claims_for_others_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidToken, match=why):
        verified(token(**changes))


def test_clocks_may_differ_a_little_and_a_token_may_have_several_audiences() -> None:
    assert verified(token(exp=NOW - 59, iat=NOW + 59))["sub"] == "ada"
    assert verified(token(aud=["you", "me"], azp="me"))["sub"] == "ada"


def test_tokens_that_no_public_key_has_signed_are_refused() -> None:
    forged = RSAKey.generate_key(2048, {"kid": "r"})
    secret = OctKey.import_key("the-client-secret-of-some-length", {"kid": "r"})
    unsigned = ".".join([*token().split(".")[:2], ""])
    none = "eyJhbGciOiJub25lIn0." + token().split(".")[1] + "."
    for text in (token(forged), token(secret, "HS256"), unsigned, none, "", "a.b.c", token()[:-8] + "AAAAAAAA"):
        with pytest.raises(InvalidToken, match="signature"):
            verified(text)


def test_an_unknown_key_is_named_as_such_since_the_provider_may_have_new_ones() -> None:
    with pytest.raises(UnknownKey):
        verified(token(), KeySet([EC]).as_dict(private=False))


def test_keys_of_other_kinds_do_not_matter() -> None:
    strange = {"kty": "AKP", "alg": "ML-DSA-65", "pub": "AAAA", "kid": "q"}
    encrypting = {**RSAKey.generate_key(2048).as_dict(private=False), "kid": "r", "use": "enc"}
    assert verified(token(), {"keys": [strange, encrypting, *PUBLIC["keys"]]})["sub"] == "ada"
    with pytest.raises(InvalidToken, match="keys"):
        verified(token(), {"keys": "none"})
