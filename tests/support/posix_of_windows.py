"""unisono.core.platform.posix as Windows sees it."""

import importlib.util
import sys
from unittest import mock

from unisono.core.platform import posix


def posix_of_windows():
    spec = importlib.util.spec_from_file_location("posix_of_windows", posix.__file__)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "platform", "win32"):
        spec.loader.exec_module(module)
    return module
