"""A plug-in of pytest: the Gloo groups of torchft's own tests are groups of unisono.

    python -m pytest -p tests.adapters.torch.torchft_groups .../torchft/process_group_test.py

The tests that lose a rank compare Gloo's words; here an error that names the rank is right, too.
"""

import unittest
from types import SimpleNamespace

from unisono.adapters.torch import membership
from unisono.adapters.torch.process_group import ProcessGroup

OURS = "rank [0-9]+ was lost|waited .* for ranks that never came: [0-9]+"


def pytest_configure():
    import torchft.process_group as torchft

    plain = unittest.TestCase.assertRaisesRegex
    torchft.ProcessGroupGloo._create_pg = made
    unittest.TestCase.assertRaisesRegex = lambda test, kind, words, *more: plain(
        test, kind, f"{words}|{OURS}", *more
    )


def made(self, store, rank, world_size):
    """Return a group of unisono for `ProcessGroupGloo.configure`."""
    options = SimpleNamespace(
        store=store, group_rank=rank, group_size=world_size, timeout=self._timeout, group_id="",
        global_ranks_in_group=[],
    )  # fmt: skip
    return ProcessGroup(membership._first_group(options, (), None), store)
