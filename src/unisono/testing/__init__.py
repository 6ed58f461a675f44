"""The third public tier: run code on several ranks in one test, and check implementations.

`run` calls a function on every rank, as threads or as processes. Every store, transport and engine
must pass its `check_*` suite. The suites need no pytest.
"""

from unisono.testing.check_engine import check_engine
from unisono.testing.check_store import check_store
from unisono.testing.check_transport import check_transport, check_vanishing
from unisono.testing.ranks import run

__all__ = ["check_engine", "check_store", "check_transport", "check_vanishing", "run"]
