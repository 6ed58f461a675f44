"""Functions of users that build schedules: their proofs, and errors that name the user's line."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unisono.core.schedules.ir import IntArray, Schedule, is_power_of_two
from unisono.errors import InvalidArgumentError, UnisonoError

# A proof takes seconds for hundreds of ranks. Simulated worlds have thousands.
PROVED_RANKS = 512

# The largest of the smaller worlds detects rounds that do not grow with the ranks. Its proof takes
# a tenth of a second.
_QUICK_RANKS = 128

# The sign of a function that asks an array of ranks a question with one answer.
_AMBIGUOUS = "truth value of an array"


@dataclass(frozen=True)
class ScheduleFamily:
    """A user's function that builds schedules, and their proofs.

    Attributes:
        collective: "all_reduce", ...
        name: The name of the algorithm.
        builder: The function.
        takes: Its parameters beside the world size.
        serves: Whether the function has a world size.
    """

    collective: str
    name: str
    builder: Callable[..., Schedule]
    takes: Sequence[str]
    serves: Callable[[int], bool]

    def built(self, size: int, given: Mapping[str, int]) -> Schedule:
        """Return a schedule whose rounds name the user's line if they raise.

        Raises:
            InvalidArgumentError: The builder raises, or returns something else.
        """
        try:
            built = self.builder(size, **given)
        except UnisonoError:
            raise
        except Exception as error:
            raise self.raised(error, size) from error
        if not isinstance(built, Schedule):
            raise InvalidArgumentError(
                f"register {self.name!r}: the builder returned {built!r}, expected a Schedule"
            )
        if not hasattr(built.rounds, "__index__"):
            raise InvalidArgumentError(
                f"register {self.name!r}: rounds is a {type(built.rounds).__name__}, expected a "
                "whole number"
            )
        if (built.collective, built.world_size) != (self.collective, size):
            raise InvalidArgumentError(
                f"register {self.name!r}: the builder returned {built.collective} on "
                f"{built.world_size} ranks, expected {self.collective} on {size}"
            )
        if built.root != given.get("root", built.root):
            raise InvalidArgumentError(
                f"register {self.name!r}: the builder returned a schedule with root {built.root}, "
                f"expected {given['root']}",
                hint="give Schedule its root=",
            )

        def exchange(k: int, ranks: IntArray) -> list[IntArray]:
            try:
                if (rows := built.exchange(k, ranks)) is None:
                    raise InvalidArgumentError(
                        f"register {self.name!r}: round {k + 1} (k={k}) returned None, expected a "
                        "list of rows"
                    )
                return list(rows)
            except UnisonoError:
                raise
            except Exception as error:
                raise self.raised(error, size, f", round {k + 1} (k={k})") from error

        # Rounded at each step, ranks get the same bits if the order alone is the same.
        return replace(built, algorithm=self.name, exchange=exchange, accumulates=False)

    def prove(self, built: Schedule) -> None:
        """Prove a schedule.

        Raises:
            ScheduleError: It is wrong.
            InvalidArgumentError: One of its functions raises.
        """
        from unisono.core.schedules.verify import verify

        try:
            verify(built)
        except UnisonoError:
            raise
        except Exception as error:
            raise self.raised(error, built.world_size) from error

    def prove_size(self, size: int, given: Mapping[str, int]) -> tuple[int, ...]:
        """Prove a world, or smaller ones in place of a large one, and return their sizes.

        The smaller ones are as divisible by 2, and have as many ranks per host. Sizes for which
        the builder raises are left out.

        Raises:
            ScheduleError: A schedule is wrong.
            InvalidArgumentError: One of its functions raises.
        """
        if size <= PROVED_RANKS:
            self.prove(self.built(size, given))
            return (size,)
        proved = []
        for less in _smaller(size, given.get("local", 1)):
            if not self.serves(less):
                continue
            root = {"root": min(given["root"], less - 1)} if "root" in given else {}
            try:
                built = self.built(less, {**given, **root})
            except InvalidArgumentError:
                continue
            try:
                self.prove(built)
            except UnisonoError as error:
                error.hint = error.hint or (
                    f"of {size} ranks the proof is that of fewer; if {less} ranks are none of "
                    f"{self.name!r}, it should raise ValueError for them"
                )
                raise
            proved.append(less)
        return tuple(proved)

    def raised(self, error: Exception, size: int, where: str = "") -> InvalidArgumentError:
        """Return the error for one that the user's functions raised, with their line."""
        hint = "r is an array of ranks: use np.where, or where= of the step"
        return InvalidArgumentError(
            f"register {self.name!r}: the builder raised {error!r} for {size} ranks"
            f"{line_of(self.builder, error)}{where}",
            hint=hint if _AMBIGUOUS in str(error) else None,
        )


def line_of(builder: Callable[..., Schedule], error: Exception) -> str:
    """Return ": FILE:LINE, in NAME" for the last line of a function's file that raised, or ""."""
    code = getattr(builder, "__code__", None)
    lines = [
        f": {Path(frame.filename).name}:{frame.lineno}, in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if code is not None and frame.filename == code.co_filename
    ]
    return (lines or [""])[-1]


def _smaller(size: int, local: int) -> list[int]:
    """Return three small worlds like a large one; fewer if hosts are large."""
    hosts = size // local
    even = min(8, hosts & -hosts)
    few, more, most = (8, 16, 64) if is_power_of_two(hosts) else (3 * even, 7 * even, 15 * even)
    found = [local * count for count in (few, more) if local * count <= PROVED_RANKS]
    return found + [local * most] * (local * most <= _QUICK_RANKS)
