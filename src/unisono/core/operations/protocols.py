"""The part of a process group that its helpers need.

Dispatch, checks, error texts and the stream queue use a group through this interface, so that
`process_group.py` can import them without an import circle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from unisono.core.backends import DeviceBackend


class GroupView(Protocol):
    """A process group, as its helpers see it; see `ProcessGroup` for the meaning."""

    calls: Any

    @property
    def stream_queue(self) -> Any: ...

    @property
    def timeout_s(self) -> float: ...

    @property
    def name(self) -> str: ...

    @property
    def group_name(self) -> str: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def backends(self) -> Mapping[str, DeviceBackend]: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def abort(self, reason: str = ...) -> None: ...

    def refuse(
        self, op: str, error: BaseException, arguments: Sequence[Any] = ..., **how: Any
    ) -> None: ...
