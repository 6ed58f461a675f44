"""Key-value stores through which ranks find each other: Hash, File, TCP, and a prefix view."""

from unisono.stores.api import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
from unisono.stores.api import Store as Store
from unisono.stores.file import FileStore as FileStore
from unisono.stores.hash import HashStore as HashStore
from unisono.stores.prefix import PrefixStore as PrefixStore
from unisono.stores.tcp_client import TCPStore as TCPStore
from unisono.stores.tcp_server import TCPStoreServer as TCPStoreServer

__all__ = [
    "DEFAULT_TIMEOUT",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "TCPStoreServer",
]
