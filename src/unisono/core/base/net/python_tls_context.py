"""What sessions of Python's ssl share, and whether there can be any."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from typing import Any, cast

from unisono.core.base import config

_Keys = Sequence[tuple[str, bytes]]
_HAS_KEYS = hasattr(ssl.SSLContext, "set_psk_client_callback")


def why_no_openssl() -> str:
    """Return why there is no TLS here; empty: there is."""
    if os.name == "nt" or not ssl.HAS_TLSv1_3:
        return "the C++ engine is not built, and Python's ssl has no TLS 1.3 here"
    if config.get("UNISONO_TLS") == "cert" or _HAS_KEYS:
        return ""
    return "the C++ engine is not built, and a Python before 3.13 has certificates only"


class TlsContext:
    """What sessions share: nothing, or the files of certificates.

    Args:
        files: Certificate, key and authority, PEM files; none for keys that both ends know.

    Raises:
        RuntimeError: A file is of no use.
    """

    def __init__(self, *files: str) -> None:
        # Server; client; client that checks the server's name.
        ends = [(True, False), (False, False), (False, True)] if files else []
        self._ends = {end: _of_files(*end, *files) for end in ends}
        self.has_certificate = bool(files)

    def end(self, is_server: bool, checks_name: bool, secrets: _Keys, shown: list[str]) -> Any:
        """Return the context of one session.

        Args:
            is_server: Whether the other end has called.
            checks_name: Whether the certificate of a server must have a name.
            secrets: The keys that both ends know.
            shown: Gets the names of the keys that a client shows.
        """
        if self._ends:
            return self._ends[is_server, checks_name]
        made = cast(Any, _plain(is_server))  # mypy knows the oldest Python
        known = dict(secrets)

        def find(identity: str | None) -> bytes:
            shown.append(identity or "")
            return known.get(identity or "", b"")

        if is_server:
            made.verify_mode = ssl.CERT_NONE
            made.set_psk_server_callback(find)
        else:
            made.set_psk_client_callback(lambda hint: secrets[0] if secrets else (None, b""))
        return made


def _plain(is_server: bool) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    if is_server:
        made.num_tickets = 0
    # Without an authority, too: a server that shows a certificate in place of the key is refused.
    made.check_hostname, made.verify_mode = False, ssl.CERT_REQUIRED
    return made


def _of_files(
    is_server: bool, checks_name: bool, certificate: str, key: str, authority: str
) -> ssl.SSLContext:
    made, path = _plain(is_server), certificate
    made.check_hostname = checks_name
    try:
        for path in (authority, certificate, key):
            with open(path, "rb"):
                pass
        # Without a password it would ask at the terminal. No error says which file is bad.
        path = f"{certificate} or {key}"
        made.load_cert_chain(certificate, key, lambda: b"")
        path = authority
        made.load_verify_locations(authority)
    except OSError as error:  # also of ssl
        raise RuntimeError(f"{path}: {error.strerror or error}") from None
    return made
