"""Moving bytes between ranks: inproc (ranks are threads), tcp, and what is registered.

A transport knows ranks, contexts and bytes, but no group, no collective and no array.
"""

from unisono.core.transports.api import Transport, has_ended
from unisono.core.transports.connect import connect
from unisono.core.transports.inproc import InprocTransport
from unisono.core.transports.messages import CallStatus, Cancelled, Key, LinkDown, MessageMismatch
from unisono.core.transports.registry import register_transport
from unisono.core.transports.tcp.transport import TCPTransport
from unisono.core.transports.transfers import Transfer

__all__ = [
    "CallStatus",
    "Cancelled",
    "InprocTransport",
    "Key",
    "LinkDown",
    "MessageMismatch",
    "TCPTransport",
    "Transfer",
    "Transport",
    "connect",
    "has_ended",
    "register_transport",
]
