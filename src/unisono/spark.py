"""Process groups in Spark barrier stages."""

from unisono.adapters.clusters.spark import run

__all__ = ["run"]
