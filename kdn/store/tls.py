"""Whom a client trusts: certificates that the system knows, or those of a private authority."""

from __future__ import annotations

import ssl

from kdn.errors import UnsupportedError

_EARLY, _EXPIRED, _OTHER_NAME, _OTHER_ADDRESS = 9, 10, 62, 64
"""Of OpenSSL's verification results (x509_vfy.h)."""
_ADVICE = {
    _EARLY: "compare the clocks of both machines",
    _EXPIRED: "renew it at the node",
    _OTHER_NAME: "use a host name that it was made for",
    _OTHER_ADDRESS: "use a host name that it was made for, or name this address in it",
}
_UNKNOWN = "if a private authority signed it, set tls_ca to that authority's PEM file"


def client_tls(tls_ca: str | None) -> ssl.SSLContext | None:
    """Trusts the authorities in this PEM file and no other; None: those of the system."""
    if tls_ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=tls_ca)
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise UnsupportedError(
            f"tls_ca {tls_ca}: expected a PEM file of certificates: {reason or error}"
        ) from error


def explain(error: BaseException) -> str:
    """What went wrong with a connection, and what to do about a certificate. Not its repr, which
    may hold a request's headers, and so the token."""
    cause = getattr(error, "certificate_error", error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        advice = _ADVICE.get(cause.verify_code, _UNKNOWN)
        return f"its certificate is not trusted ({cause.verify_message}): {advice}"
    kind = type(error).__name__
    return f"{kind}: {error}" if str(error) else kind
