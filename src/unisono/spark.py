"""Process groups in Spark barrier stages."""

from unisono.integrations.spark import run

__all__ = ["run"]
