"""Process groups in Ray actors, a backend for `ray.util.collective`, and a direct transport."""

from unisono.adapters.clusters.ray import (
    Group,
    init_group,
    register_collective,
    register_tensor_transport,
)

__all__ = ["Group", "init_group", "register_collective", "register_tensor_transport"]
