"""Rendezvous: turn a URL into a store, a rank and a world size."""

from unisono.core.rendezvous.registry import Handler as Handler
from unisono.core.rendezvous.registry import (
    register_rendezvous_handler as register_rendezvous_handler,
)
from unisono.core.rendezvous.registry import rendezvous as rendezvous

__all__ = ["Handler", "register_rendezvous_handler", "rendezvous"]
