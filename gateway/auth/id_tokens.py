"""Verifies ID tokens by OpenID Connect Core 1.0, section 3.1.3.7. Needs the optional package `joserfc`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

ALGORITHMS = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519",
)  # fmt: skip  # only signatures with public keys, never `none` and no HMAC with the client's secret
KEY_TYPES = ("RSA", "EC", "OKP")
SKEW_SECONDS = 60.0  # by which the provider's clock may differ from this machine's


class InvalidToken(Exception):
    """The ID token is not valid. The message says why, and contains nothing secret."""


class UnknownKey(InvalidToken):
    """No key of the provider has the token's key id. It may have new keys."""


def verify_id_token(
    token: str, keys: Mapping[str, Any], *, issuer: str, client_id: str, nonce: str, now: float
) -> dict[str, Any]:
    """Return the claims of an ID token. `keys` is a JWK set, and `now` is in seconds. Raises `InvalidToken`."""
    usable = _usable_keys(keys)
    try:
        decoded = jwt.decode(token, KeySet.import_key_set({"keys": usable}), algorithms=list(ALGORITHMS))
    except InvalidKeyIdError:
        raise UnknownKey("its key is not among the provider's") from None
    except (JoseError, ValueError, TypeError, KeyError) as error:
        raise InvalidToken(f"its signature cannot be verified ({type(error).__name__})") from None
    claims = dict(decoded.claims)
    _check_claims(claims, issuer=issuer, client_id=client_id, nonce=nonce, now=now)
    return claims


def _usable_keys(keys: Mapping[str, Any]) -> list[Any]:
    """The public keys for signatures in a JWK set. RFC 7517 says to ignore the others."""
    found = keys.get("keys")
    if not isinstance(found, list):
        raise InvalidToken("the provider's keys are no JWK set")
    return [
        key for key in found if isinstance(key, dict) and key.get("kty") in KEY_TYPES and key.get("use", "sig") == "sig"
    ]


def _check_claims(claims: Mapping[str, Any], *, issuer: str, client_id: str, nonce: str, now: float) -> None:
    audience = claims.get("aud")
    audiences = audience if isinstance(audience, list) else [audience]
    subject, expires, issued = claims.get("sub"), claims.get("exp"), claims.get("iat")
    if claims.get("iss") != issuer:
        raise InvalidToken("it is from another issuer")
    if client_id not in audiences:
        raise InvalidToken("it is for another client")
    if claims.get("azp", client_id) != client_id or (len(audiences) > 1 and "azp" not in claims):
        raise InvalidToken("it was issued to another client")
    if claims.get("nonce") != nonce:
        raise InvalidToken("it is for another sign-in")
    if not isinstance(subject, str) or not subject:
        raise InvalidToken("it has no subject")
    if not isinstance(expires, int | float) or now >= expires + SKEW_SECONDS:
        raise InvalidToken("it has expired")
    if not isinstance(issued, int | float) or issued > now + SKEW_SECONDS:
        raise InvalidToken("it is from the future: compare the clocks of this machine and of the provider")
