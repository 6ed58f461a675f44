"""Process groups in Ray actors, and a backend for `ray.util.collective`."""

from unisono.adapters.clusters.ray import Group, init_group, register_collective

__all__ = ["Group", "init_group", "register_collective"]
