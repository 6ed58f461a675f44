"""Key-value stores through which ranks find each other: Hash, File, TCP, and a prefix view."""

from unisono.stores.api import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
from unisono.stores.api import Store as Store
from unisono.stores.file import FileStore as FileStore
from unisono.stores.hash import HashStore as HashStore
from unisono.stores.prefix import PrefixStore as PrefixStore
from unisono.stores.server import StoreServer as StoreServer
from unisono.stores.server import start_server as start_server
from unisono.stores.tcp_client import TCPStore as TCPStore

__all__ = [
    "DEFAULT_TIMEOUT",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Store",
    "StoreServer",
    "TCPStore",
    "start_server",
]
