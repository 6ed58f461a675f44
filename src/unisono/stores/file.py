"""placeholder"""
from unisono.stores.hash import HashStore


class FileStore(HashStore):
    def __init__(self, path: str, world_size: int = -1) -> None:
        super().__init__()
