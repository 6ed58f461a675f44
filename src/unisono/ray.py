"""Process groups in Ray actors, and a backend for `ray.util.collective`."""

from unisono.integrations.ray import Group, init_group, register_collective

__all__ = ["Group", "init_group", "register_collective"]
