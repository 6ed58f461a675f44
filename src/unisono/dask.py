"""Process groups on Dask workers."""

from unisono.integrations.dask import run

__all__ = ["run"]
