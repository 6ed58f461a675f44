"""One examination, by itself or before a launch."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from unisono.core.platform.machine import busy_text
from unisono.core.stores import PrefixStore, TCPStore
from unisono.errors import HandshakeError, NetworkError, RendezvousError, StoreError
from unisono.launcher.agent import examination_store, open_shared
from unisono.workbench.cli.doctor.examine import Examiner, ExamPlan
from unisono.workbench.cli.doctor.facts import ERROR, OK, WARNING, Examination, Finding
from unisono.workbench.cli.doctor.findings import endpoint_fault, findings
from unisono.workbench.cli.nodes import node_options


class Session:
    """The examination of one host or several, seen from this host; use once.

    Args:
        options: The flags of `add_node_flags`.
        nprocs: Number of ranks on this host.
        show: Shows a line about the progress.

    Attributes:
        facts: The facts; after `examine`.
        found: The findings, errors first.
    """

    def __init__(
        self, options: argparse.Namespace, nprocs: int, show: Callable[[str], None]
    ) -> None:
        fields = node_options(options)
        self._errors_only = getattr(options, "doctor", True) == "errors"
        self._show = show
        self._run_id = str(fields["run_id"])
        self._plan = ExamPlan(
            nprocs=nprocs,
            limits=fields["limits"],
            meeting=fields["meeting"],
            wanted=getattr(options, "hosts", ()),
            show=(lambda line: None) if self._errors_only else show,
        )
        self.facts: Examination
        self.found: list[Finding] = []
        self._severities: Sequence[str] = (ERROR, WARNING, OK)

    def examine(
        self, store: PrefixStore | None = None, canceled: Callable[[], bool] = lambda: False
    ) -> None:
        """Examine this host, then the others; a host that cannot meet the others is a finding.

        Args:
            store: Where the hosts meet; None: open it.
            canceled: Function that returns whether to give up the wait for other hosts.
        """
        plan = self._plan
        examiner = Examiner(plan)
        self.facts = examiner.alone()
        if fault := endpoint_fault(examiner.host, plan.endpoint):
            self.found = [fault]
            return
        try:
            if plan.limits.max_nodes > 1:
                plan.show("waiting for the other hosts")
                with self._opened(store) as shared:
                    self.facts = examiner.examine(shared, canceled)
                    if store is None and examiner.is_first:
                        _clear(shared)
            self.found = findings(self.facts)
        except (StoreError, NetworkError, RendezvousError) as error:
            if canceled():
                raise
            topic = "token" if isinstance(error, HandshakeError) else "reach"
            reason = error.what.partition("\n")[0]
            fact = f"{examiner.host.name} could not meet the other hosts: {reason}"
            failure = Finding(topic, ERROR, fact, error.hint or "")
            # A token that the store refuses is not fine, even if this host has one.
            own = [f for f in findings(self.facts) if (f.topic, f.severity) != (topic, OK)]
            self.found = [failure, *(found for found in own if found.topic != "hosts")]
        if not examiner.is_first and len(self.facts.hosts) > 1:
            self._severities = (ERROR,)

    def examine_before_run(self, store: PrefixStore, canceled: Callable[[], bool]) -> None:
        """Examine the hosts of a launch, and show its faults.

        Raises:
            RendezvousError: A finding would stop the job.
        """
        self.examine(store, canceled)
        # With `--hosts` what the first host shows is enough.
        if not self._errors_only or (self.exit_code and WARNING in self._severities):
            for line in self.lines((ERROR, WARNING)):
                self._show(line)
        if self.exit_code:
            raise RendezvousError("the doctor found errors, so no worker was started")

    @property
    def exit_code(self) -> int:
        """1 if a finding would stop a job, else 0."""
        return int(any(finding.severity == ERROR for finding in self.found))

    def lines(self, severities: Sequence[str] = (ERROR, WARNING, OK)) -> Iterator[str]:
        """Yield each finding and its fix, and a summary; on hosts but the first, errors only."""
        for _, severity, fact, fix in self.found:
            if severity in severities and severity in self._severities:
                yield f"{severity + ':':<8} {fact}"
                if fix:
                    yield f"{'':<8} fix: {fix}"
        if busy := busy_text():
            yield f"{'note:':<8} {busy}: calls will be slower than on a quiet one"
        verdict = "a job would stop" if self.exit_code else "a job can start"
        counts = [sum(f.severity == kind for f in self.found) for kind in (ERROR, WARNING)]
        yield f"{verdict} (errors: {counts[0]}, warnings: {counts[1]})"

    def document(self) -> dict[str, Any]:
        """Return the content of `--json`."""
        found = [finding._asdict() for finding in self.found]
        return {"exit_code": self.exit_code, "findings": found, **asdict(self.facts)}

    @contextlib.contextmanager
    def _opened(self, store: PrefixStore | None) -> Iterator[PrefixStore]:
        if store is not None:
            yield store
            return
        base, _ = open_shared(self._plan.meeting, lambda: False)
        with base, examination_store(base, self._run_id) as own:
            yield own


def _clear(store: PrefixStore) -> None:
    """Delete all keys of a lasting store, which another examination may use."""
    if not isinstance(store.underlying_store, TCPStore):
        for key in store.list_keys():
            store.delete_key(key)
