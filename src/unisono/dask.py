"""Process groups on Dask workers."""

from unisono.adapters.clusters.dask import run

__all__ = ["run"]
