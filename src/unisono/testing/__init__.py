"""The third public tier: run code on several ranks in one test, and check implementations.

`run` calls a function on every rank, as threads or as processes. Every store, transport and engine
must pass its `check_*` suite. The suites need no pytest;
`RunOnRanks` does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.testing.engine_suite import check_engine
    from unisono.testing.plugin import RunOnRanks
    from unisono.testing.ranks import run
    from unisono.testing.store_suite import check_store
    from unisono.testing.transport_suite import check_transport, check_vanishing

__all__ = ["RunOnRanks", "check_engine", "check_store", "check_transport", "check_vanishing", "run"]

_HOMES = {
    "RunOnRanks": "plugin",
    "check_engine": "engine_suite",
    "check_store": "store_suite",
    "check_transport": "transport_suite",
    "check_vanishing": "transport_suite",
    "run": "ranks",
}


def __getattr__(name: str) -> Any:
    # Every run of pytest loads the plug-in, and few need the ranks.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
