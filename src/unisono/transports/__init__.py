"""Moving bytes between ranks: inproc (ranks are threads) and tcp.

May import `stores`, `base` and `errors`. A transport knows ranks, contexts and bytes; never a
group name, a collective or a dtype.
"""

from unisono.transports.api import (
    Cancelled,
    Key,
    LinkDown,
    MessageMismatch,
    Status,
    Transfer,
    Transport,
)
from unisono.transports.connect import connect
from unisono.transports.inproc import InprocTransport
from unisono.transports.tcp.transport import TCPTransport

__all__ = [
    "Cancelled",
    "InprocTransport",
    "Key",
    "LinkDown",
    "MessageMismatch",
    "Status",
    "TCPTransport",
    "Transfer",
    "Transport",
    "connect",
]
