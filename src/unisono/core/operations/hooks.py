"""Hooks of one group: functions called before and after each call, and when the group breaks.

A group with hooks before or after calls makes each call in Python. A hook at the abort, like
everything that reads the records of calls, leaves repeated calls to C++.

Source: torch._C._distributed_c10d.ProcessGroup (torch's main line, 2026).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from threading import get_ident
from typing import Any, NamedTuple

from unisono.core.base.log import get_logger, log_raised
from unisono.core.operations.participation import number_of
from unisono.core.operations.table import OpSchema
from unisono.errors import InvalidArgumentError

_log = get_logger("groups.hooks")

HookOpName = Enum(
    "HookOpName",
    "SEND RECV BROADCAST ALLREDUCE REDUCE ALLGATHER REDUCE_SCATTER ALLTOALL BARRIER SCATTER GATHER "
    "SPLIT NEW_WINDOW ALLREDUCE_COALESCED ALLGATHER_BASE ALLGATHER_COALESCED "
    "ALLGATHER_INTO_TENSOR_COALESCED REDUCE_SCATTER_BASE REDUCE_SCATTER_TENSOR_COALESCED "
    "ALLTOALL_BASE UNKNOWN",
    start=0,
)
"""c10d's names of operations; UNKNOWN: c10d has no such one."""

_WHOLE = {
    "split_group": HookOpName.SPLIT,
    "new_window": HookOpName.NEW_WINDOW,
    "send_object_list": HookOpName.SEND,
    "recv_object_list": HookOpName.RECV,
}


class PreHookArgs(NamedTuple):
    """The argument of a hook before a call.

    Attributes:
        name: c10d's name of the operation.
        async_op: Whether the call returns before its end.
        input_tensors: The arrays that this rank contributes.
        output_tensors: The arrays that the call writes here; of a call in place those above.
        root: Rank in the group of the root, or of the other rank of a message; -1 without one.
        op_id: Number that the hooks before and after one call have in common.
        op: Name of the function: "all_reduce".
        number: Number of the collective in the group; 0 for a message.
    """

    name: Any
    async_op: bool
    input_tensors: list[Any]
    output_tensors: list[Any]
    root: int
    op_id: int
    op: str
    number: int


class PostHookArgs(NamedTuple):
    """The argument of a hook after a call: `work` is done, unless the call is asynchronous.

    It is None after a call that consists of calls, such as one of objects.
    """

    name: Any
    async_op: bool
    work: Any
    op_id: int
    op: str
    number: int


class Hooks:
    """The hooks of a group by their ids: before calls, after calls, at the abort."""

    def __init__(self) -> None:
        self.before: dict[int, Callable[[PreHookArgs], object]] = {}
        self.after: dict[int, Callable[[PostHookArgs], object]] = {}
        self.at_abort: dict[int, Callable[[], object]] = {}
        self._ids = itertools.count(1)
        # The threads in a call that consists of calls, of objects for instance.
        self._whole: set[int] = set()

    def begin(
        self, group: Any, schema: OpSchema, arguments: tuple[Any, ...], how: dict[str, Any]
    ) -> PreHookArgs | None:
        """Call the hooks before a call, but for a part; an error of one is an error of the call."""
        if get_ident() in self._whole:
            return None
        if schema.name == "agree":
            return self.begin_named(group, str(arguments[0]).partition("(")[0])
        values = dict(zip(schema.parameters, arguments, strict=False)) | how
        root = values.get("root", values.get("peer"))
        if root is None:
            root = 0 if "root" in schema.parameters else -1
        kinds = {name: kind.lower() for name, kind in schema.parameters.items()}
        name = schema.c10d_op.removesuffix("_any_source_").strip("_").upper()
        is_message = name in ("SEND", "RECV") or not schema.c10d_op
        outputs = list(_arrays(values, kinds, "wv"))
        inputs = list(_arrays(values, kinds, "rs"))
        in_place = not {"r", "s"} & {*kinds.values()} and name != "RECV"
        if in_place and (name != "BROADCAST" or root == group.rank()):
            inputs = outputs
        return self._call_before(
            HookOpName.__members__.get(name, HookOpName.UNKNOWN),
            how.get("async_op", False),
            inputs,
            outputs,
            root,
            next(self._ids),
            how.get("_label") or schema.name,
            0 if is_message else number_of(group.backends) + 1,
        )

    def begin_whole(self, group: Any, op: str, peer: int | None = None) -> PreHookArgs | None:
        """Begin a call of this thread whose parts are calls; `end` ends it.

        Args:
            group: The group.
            op: Name of the function.
            peer: Of messages: the other rank, -1 for any.
        """
        if get_ident() in self._whole:
            return None
        call = self.begin_named(group, op, peer)
        self._whole.add(get_ident())
        return call

    def leave_whole(self) -> None:
        """End the parts of a call that `begin_whole` began."""
        self._whole.discard(get_ident())

    @contextmanager
    def parts(self) -> Iterator[None]:
        """Make calls that are parts of a call whose begin the hooks have seen."""
        is_outer = get_ident() not in self._whole
        self._whole.add(get_ident())
        try:
            yield
        finally:
            if is_outer:
                self.leave_whole()

    def begin_named(self, group: Any, op: str, peer: int | None = None) -> PreHookArgs:
        """Call the hooks before a call of this name; `peer` is as in `begin_whole`."""
        name = _WHOLE.get(op, HookOpName.UNKNOWN)
        root, number = (-1, number_of(group.backends) + 1) if peer is None else (peer, 0)
        return self._call_before(name, False, [], [], root, next(self._ids), op, number)

    def _call_before(self, *values: Any) -> PreHookArgs:
        call = PreHookArgs(*values)
        for hook in [*self.before.values()]:
            hook(call)
        return call

    def end(self, call: PreHookArgs, work: Any) -> None:
        """Call the hooks after a call."""
        made = PostHookArgs(call.name, call.async_op, work, call.op_id, call.op, call.number)
        for hook in [*self.after.values()]:
            hook(made)

    def clear(self) -> None:
        """Forget all hooks of a closed group: they may refer to it, which is a circle."""
        for known in (self.before, self.after, self.at_abort):
            known.clear()

    def abort(self) -> None:
        """Call the hooks at the abort; the group breaks whatever they raise."""
        for hook in [*self.at_abort.values()]:
            try:
                hook()
            except Exception:
                log_raised(_log, "a hook at the abort raised")


def _arrays(values: dict[str, Any], kinds: dict[str, str], which: str) -> Iterator[Any]:
    """Yield the arrays of a call that have one of some kinds."""
    for name, kind in kinds.items():
        if kind in which:
            yield from leaves(values.get(name))


def leaves(value: Any) -> Iterator[Any]:
    """Yield the arrays of an argument, which may be nested lists."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from leaves(each)
    elif value is not None:
        yield value


class Hooked:
    """The part of a process group that registers hooks."""

    __slots__ = ("__dict__",)

    _hooks: Hooks | None = None
    backends: dict[str, Any]
    calls: Any
    port: Any
    stream_queue: Any
    _block: Any
    _part: Any

    def _block_here(self) -> Any:
        """Return the block of calls that this thread is in, or None."""
        block = self._block
        return block if block is not None and block.thread == get_ident() else None

    def register_pre_hook(self, hook_id: int, hook: Callable[[PreHookArgs], object]) -> None:
        """Call `hook(args)` before each call.

        An error that it raises is an error of a collective on all ranks. A message is not sent or
        not received then: the other rank waits for it, until its time-out.

        Raises:
            InvalidArgumentError: The group has such a hook with this id.
        """
        self._register("before", hook_id, hook)

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Remove the hook with this id; do nothing without one."""
        self._unregister("before", hook_id)

    def register_post_hook(self, hook_id: int, hook: Callable[[PostHookArgs], object]) -> None:
        """Call `hook(args)` after each call that raised no error.

        An error that it raises is raised on this rank only, and the group stays usable.

        Raises:
            InvalidArgumentError: The group has such a hook with this id.
        """
        self._register("after", hook_id, hook)

    def unregister_post_hook(self, hook_id: int) -> None:
        """Remove the hook with this id; do nothing without one."""
        self._unregister("after", hook_id)

    def register_abort_hook(self, hook_id: int, hook: Callable[[], object]) -> None:
        """Call `hook()` when the group breaks, on any thread; it must not wait for the group.

        Raises:
            InvalidArgumentError: The group has such a hook with this id.
        """
        self._register("at_abort", hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Remove the hook with this id; do nothing without one."""
        self._unregister("at_abort", hook_id)

    def _register(self, when: str, hook_id: int, hook: Callable[..., object]) -> None:
        if self._hooks is None:
            self._hooks = Hooks()
            for backend in self.backends.values():
                backend.on_broken(self._hooks.abort)
        known = getattr(self._hooks, when)
        if hook_id in known:
            raise InvalidArgumentError(f"the group has a hook with id {hook_id} already")
        known[hook_id] = hook
        self._choose_way()

    def _unregister(self, when: str, hook_id: int) -> None:
        if self._hooks is not None:
            getattr(self._hooks, when).pop(hook_id, None)
            self._choose_way()

    def _choose_way(self) -> None:
        """Let C++ make repeated calls, unless Python must see each call."""
        cpu, hooks = self.backends.get("cpu"), self._hooks
        plain = cpu is not None and not (hooks and (hooks.before or hooks.after))
        is_free = plain and self._block is None and not self._part.has_missed
        self.calls = cpu.calls if cpu is not None and is_free else None
        self.port = cpu.port if cpu is not None and plain and self.stream_queue is None else None
