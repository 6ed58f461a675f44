"""torch.distributed.nn's path; needs torch."""

from unisono.nn import functional

__all__ = ["functional"]
