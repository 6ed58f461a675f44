"""What makes sessions of TLS: C++, or its twins in Python."""

from __future__ import annotations

import functools
from typing import Any

from unisono.core.base.seam import cpp


@functools.cache
def tls_maker() -> Any:
    """Return the module that has TlsContext, TlsSession and why_no_openssl."""
    if hasattr(cpp, "TlsSession"):
        return cpp
    from unisono.core.base.net import python_tls  # it takes long to load

    return python_tls
