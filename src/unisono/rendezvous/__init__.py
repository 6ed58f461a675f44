"""How ranks meet: a URL becomes a store, a rank and a world size."""

from unisono.rendezvous.registry import Handler as Handler
from unisono.rendezvous.registry import register_rendezvous_handler as register_rendezvous_handler
from unisono.rendezvous.registry import rendezvous as rendezvous

__all__ = ["Handler", "register_rendezvous_handler", "rendezvous"]
