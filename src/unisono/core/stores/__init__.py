"""Key-value stores through which ranks find each other.

HashStore, FileStore, TCPStore and the view PrefixStore are exported here. EtcdStore and RedisStore
are in `services`, because they need packages of their own.
"""

from unisono.core.stores.api import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
from unisono.core.stores.api import Store as Store
from unisono.core.stores.files.store import FileStore as FileStore
from unisono.core.stores.hash import HashStore as HashStore
from unisono.core.stores.prefix import PrefixStore as PrefixStore
from unisono.core.stores.tcp.client import TCPStore as TCPStore
from unisono.core.stores.tcp.native_server import start_server as start_server
from unisono.core.stores.tcp.server import StoreServer as StoreServer

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
