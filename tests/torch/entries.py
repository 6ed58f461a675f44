"""Calls a body by name, so that the process of the tests need not load what bodies load."""

from importlib import import_module

from unisono.testing import run


def call(rank, module, function, *args):
    return getattr(import_module(module), function)(rank, *args)


def run_body(module, function, world_size, *args, **options):
    """Run a body on ranks that are processes; return its results."""
    return run(call, world_size, ranks="processes", args=(module, function, *args), **options)
