"""TLS to deployments: certificates and host names are always verified, by the system's authorities or the policy's."""

from __future__ import annotations

import ssl

from gateway.policy import UpstreamTLS


class UnusableFile(ValueError):
    """A file that the policy names for TLS cannot be used. `field` is the name of the policy's field."""

    def __init__(self, field: str, file: str, error: OSError) -> None:
        reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else error.strerror or str(error)
        super().__init__(f"{file}: {reason.replace('_', ' ').lower()}")
        self.field = field


def tls_context(tls: UpstreamTLS | None) -> ssl.SSLContext:
    """Return a context that verifies certificate and host name. Raises `UnusableFile`.

    Without `tls.ca`, the authorities are the system's, or those of `SSL_CERT_FILE` and `SSL_CERT_DIR`.
    """
    tls = tls or UpstreamTLS()
    try:
        context = ssl.create_default_context(cafile=tls.ca)
    except OSError as error:
        raise UnusableFile("ca", tls.ca or "", error) from None
    if tls.cert is not None:
        try:
            context.load_cert_chain(tls.cert, tls.key, password=_no_password)
        except OSError as error:
            field, file = ("cert", tls.cert) if tls.key is None else ("key", f"{tls.cert} with {tls.key}")
            raise UnusableFile(field, file, error) from None
    return context


def _no_password() -> str:
    """Called by OpenSSL for an encrypted key. Without it, OpenSSL would ask on the terminal."""
    return ""
