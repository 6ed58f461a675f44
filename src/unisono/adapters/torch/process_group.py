"""torch.distributed's ProcessGroup over a unisono process group."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Backend

from unisono.adapters.torch.callbacks import CallbackThreads
from unisono.adapters.torch.dynamo import keep_out
from unisono.adapters.torch.name import NAME, shown_name, warn_of_libraries
from unisono.adapters.torch.operations import TorchOperations
from unisono.adapters.torch.store import TorchStore
from unisono.core.backends import GroupSpec
from unisono.core.base.source.tracebacks import hide_own_frames
from unisono.core.groups.process_group import ProcessGroup as UnisonoGroup
from unisono.core.groups.process_group import group_timeout_s
from unisono.core.recorder import skip_folder
from unisono.core.stores import PrefixStore
from unisono.errors import ArgumentTypeError, ClosedError, UnsupportedError

__all__ = ["ProcessGroup", "name_of", "sort_options"]

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep


class _CPUBackend:
    """A group's backend for the CPU, as torch's Python code and users see it.

    Attributes not named here are those of the group.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_time_estimate = False

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._set_default_timeout = group.set_timeout

    @property
    def options(self) -> Any:
        """Options as torch has them, with the time-out of the group."""
        options = Backend.Options(NAME, timedelta(seconds=self._group.unisono.timeout_s))
        options.group_name = self._group.group_name
        options.global_ranks_in_group = list(self._group.unisono.ranks)
        return options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class ProcessGroup(TorchOperations, torch_dist.ProcessGroup):
    """torch's process group over a unisono process group.

    `torch.distributed.init_process_group("unisono")` and `new_group` make it. Tensors of other
    devices go to the backend named for them, as in "cpu:unisono,cuda:nccl".

    Args:
        group: The unisono process group.
        store: The torch store from which the group was made.
        options: torch's own `pg_options`, which are for the backends of other devices.

    Attributes:
        unisono: The unisono process group.

    Source: torch.distributed.ProcessGroup (2.13).
    """

    def __init__(self, group: UnisonoGroup, store: Any, options: Any = None) -> None:
        keep_out()
        hide_own_frames()
        skip_folder(_TORCH_FOLDER)
        # Without a store: that constructor makes no object of a sub-class in torch 2.13.
        super().__init__(group.rank(), group.size())
        self.unisono = group
        self._store = store
        self._options = options
        self.callbacks = CallbackThreads(group.name)
        # If the program drops the group, whose own finalizer closes the links.
        weakref.finalize(self, self.callbacks.end).atexit = False
        self._name: str | None = None
        self._description = "undefined"
        self._bound: torch.device | None = None
        self._devices: dict[str, Any] = {}
        self._has_devices: bool | None = None
        # Number of groups of these ranks made from this group. It is part of their key in the
        # store. torch's name cannot be: with local synchronization it differs between ranks.
        self._made: Counter[tuple[int, ...]] = Counter()
        self._forget_exit: Callable[[], None] = lambda: None
        # The store of the first default group of this process, in which `reconfigure` meets.
        self._root = store

    # ---- identity -------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """Return "unisono", or what UNISONO_TORCH_NAME has for a library that calls `name()`."""
        return shown_name(1)

    def getSize(self) -> int:
        """Return the number of ranks."""
        warn_of_libraries()
        return self.unisono.size()

    def get_group_store(self) -> Any:
        """Return the torch store from which the group was made."""
        return self._store

    @property
    def group_name(self) -> str:
        """Torch's name of the group, a number or a hash."""
        if self._name is None:
            raise RuntimeError("ProcessGroup name not set")
        return self._name

    def getGroupName(self) -> str:
        """Return `group_name`, for C++."""
        return self.group_name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name

    @property
    def group_desc(self) -> str:
        """The value of `group_desc=`."""
        return self._description

    def getGroupDesc(self) -> str:
        """Return `group_desc`, for C++."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    setGroupDesc = _set_group_desc

    @property
    def bound_device_id(self) -> torch.device | None:
        """The device of `init_process_group(device_id=...)`, None on the CPU."""
        return self._bound

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._bound = device

    # ---- devices --------------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self._backend_names()]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return _CPUBackend(self)
        return self.on_device(device.type)._get_backend(device)

    def _backend_names(self) -> dict[str, str]:
        """Return device -> backend, as the user wrote it in `init_process_group`."""
        config = c10d._world.pg_backend_config.get(self, NAME)
        names: dict[str, str] = c10d.BackendConfig(c10d.Backend(config)).get_device_backend_map()
        return names

    def has_devices(self) -> bool:
        """Return whether the group has backends of other devices.

        Raises:
            UnsupportedError: "unisono" was named for another device than the CPU.
            ArgumentTypeError: There are options for another backend, and no such backend.
        """
        if self._has_devices is None:
            # Unknown in the constructor, because torch records the backends after it.
            names = self._backend_names()
            if names.get("cpu") != NAME or list(names.values()).count(NAME) > 1:
                raise UnsupportedError(
                    f"backend 'unisono' is for tensors on the CPU; group '{self.unisono.name}' has "
                    f"{', '.join(f'{device}:{name}' for device, name in names.items())}",
                    hint='write "cpu:unisono" and another backend for each other device',
                )
            if self._options is not None and len(names) == 1:
                raise ArgumentTypeError(
                    "pg_options for backend 'unisono' must be unisono.lowlevel.CPUOptions, "
                    f"got {type(self._options).__qualname__}"
                )
            self._has_devices = len(names) > 1
        return self._has_devices

    def on_device(self, device: str) -> Any:
        """Return torch's own process group for another device; make it on first use.

        torch stops at the first backend that is a process group. For "cpu:unisono,cuda:nccl"
        unisono must therefore make the group of the second backend.

        Raises:
            UnsupportedError: No backend was named for the device.
        """
        if device not in self._devices:
            names = self._backend_names()
            if names.get(device, NAME) == NAME:
                raise UnsupportedError(
                    f"group '{self.unisono.name}' has no backend for tensors on {device!r} "
                    f"(it has: {', '.join(f'{d}:{b}' for d, b in names.items())})",
                    hint=f'name one: init_process_group("cpu:unisono,{device}:...")',
                )
            group, _ = c10d._new_process_group_helper(
                self.size(),
                self.rank(),
                c10d.get_process_group_ranks(self),
                c10d.Backend(f"{device}:{names[device]}"),
                self._store,
                c10d.GroupName(f"{self.group_name}/{device}"),
                backend_options=self._options,
                timeout=timedelta(seconds=self.unisono.timeout_s),
            )
            self._devices[device] = group
        return self._devices[device]

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescer(device)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._coalescer(device)._end_coalescing(device)

    def _coalescer(self, device: torch.device) -> Any:
        if device.type == "cpu":
            raise UnsupportedError(
                "backend 'unisono' does not coalesce calls on the CPU one by one",
                hint="leave `device` out: the coalescing manager then makes one call of them",
            )
        return self.on_device(device.type)

    # ---- life -----------------------------------------------------------------------------

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """Return a group of some ranks, None on other ranks; all ranks of this group call it."""
        if self.rank() not in new_ranks:
            return None
        name = group_name or f"{self._name}:split:{'-'.join(map(str, new_ranks))}"
        ranks = tuple(self.unisono.ranks[rank] for rank in new_ranks)
        group = self.child(ranks, self._store, timeout, opts)
        group._set_group_name(name)
        group._set_group_desc(group_desc or "undefined")
        return group

    def child(
        self, ranks: tuple[int, ...], store: Any, timeout: timedelta | None, options: Any
    ) -> ProcessGroup:
        """Return a group of some global ranks, this rank included, over this group's links."""
        if not self.unisono.backends:
            raise ClosedError(f"new_group on group '{self.unisono.name}', which was destroyed")
        ours, theirs = sort_options(options)
        key = f"torch/{'-'.join(map(str, ranks))}/{self._made[ranks]}"
        self._made[ranks] += 1
        spec = GroupSpec(
            PrefixStore(key, TorchStore(store)),
            ranks.index(self.unisono.ranks[self.unisono.rank()]),
            len(ranks),
            ranks,
            name_of(ranks),
            key,
            self.unisono.timeout_s if timeout is None else given_timeout_s(timeout),
            ours,
        )
        group = UnisonoGroup.from_spec(spec, parent=self.unisono)
        return ProcessGroup(group, store, theirs)

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse, because a group of ranks that share no store cannot be joined."""
        raise UnsupportedError("backend 'unisono' has no merge_remote_group")

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the default time-out of later calls."""
        self.unisono.set_timeout(timeout)

    def abort(self) -> None:
        """End every call of the group with an error, on all ranks."""
        self.unisono.abort("torch's abort() was called")
        for group in self._devices.values():
            group.abort()

    def shutdown(self) -> None:
        """Finish the calls that were made and close the group, as `unisono`'s `close` does."""
        self.unisono.close()
        self.callbacks.close()
        self._forget_exit()

    def _get_sequence_number_for_group(self) -> int:
        return self.unisono._get_sequence_number_for_group()

    def _set_sequence_number_for_group(self) -> None:
        self.unisono._set_sequence_number_for_group()

    def __repr__(self) -> str:
        return f"<unisono.torch.ProcessGroup {self.unisono!r}>"

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a process group: it belongs to this process")


def name_of(ranks: tuple[int, ...]) -> str:
    """Return the name of a group in errors; torch's name is a number or a hash."""
    shown = ",".join(map(str, ranks[:8]))
    return f"ranks {shown}" if len(ranks) <= 8 else f"ranks {shown},... ({len(ranks)})"


def given_timeout_s(timeout: timedelta | None) -> float:
    """Return the time-out that torch passes for a new group, or UNISONO_TIMEOUT for its default.

    torch passes its default if the script gives none, which looks like a time-out of 30 minutes.
    """
    return group_timeout_s(None if timeout == c10d.default_pg_timeout else timeout)


def sort_options(options: Any) -> tuple[Any, Any]:
    """Return `pg_options` as (options for unisono, options for torch's own backends)."""
    if isinstance(options, Backend.Options) and options.backend == NAME:
        # Those of `_CPUBackend.options`, which have nothing that torch does not pass as well.
        return None, None
    return (None, options) if isinstance(options, Backend.Options) else (options, None)
