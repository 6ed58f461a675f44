"""Checks that the arrays of one call have sizes that fit one another."""

from __future__ import annotations

from unisono.backends.flat import Flat
from unisono.backends.splits import Blocks
from unisono.errors import InvalidArgumentError

__all__ = ["require_blocks", "require_stripes", "require_total"]


def require_blocks(sizes: tuple[int, ...], rank: int, count: int, name: str) -> Blocks | None:
    """Return the sizes of a list's blocks if they differ, None if all are `count`.

    Args:
        sizes: Elements of the arrays of the list, one for each rank.
        rank: This rank.
        count: Elements of its own array.
        name: Of the list, for errors.

    Raises:
        InvalidArgumentError: This rank's entry is not as large as its array.
    """
    if sizes[rank] != count:
        raise InvalidArgumentError(
            f"{name}[{rank}] has {sizes[rank]} elements, this rank's own array {count}"
        )
    blocks = Blocks.listed(sizes)
    return None if blocks.even else blocks


def require_total(world_size: int, whole: Flat, part: int, whole_name: str, part_name: str) -> None:
    """Check that `whole` has one part for each rank.

    Raises:
        InvalidArgumentError: It has more or less.
    """
    if whole.count != world_size * part:
        raise InvalidArgumentError(
            f"{whole_name} has {whole.count} elements, expected {world_size * part}: "
            f"{world_size} ranks x {part} of {part_name}"
        )


def require_stripes(
    world_size: int, whole: Flat, part: Flat, whole_name: str, part_name: str
) -> None:
    """Check that every array of `whole` has one part for each rank.

    Raises:
        InvalidArgumentError: One has more or less.
    """
    if whole.sizes != tuple([n * world_size for n in part.sizes]):
        raise InvalidArgumentError(
            f"{whole_name} hold {list(whole.sizes)} elements and {part_name} "
            f"{list(part.sizes)}; expected {world_size} times as many in {whole_name}"
        )
