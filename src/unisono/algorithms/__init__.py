"""torch.distributed.algorithms' path."""

from unisono.algorithms.join import Join, Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable"]
