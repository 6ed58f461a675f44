"""Checks that the arrays of one call have sizes that fit one another."""

from __future__ import annotations

from unisono.backends.staging import Flat
from unisono.errors import InvalidArgumentError

__all__ = ["require_blocks", "require_stripes", "require_total"]


def require_blocks(sizes: tuple[int, ...], count: int, name: str) -> None:
    """Check that all arrays of a list have `count` elements.

    Raises:
        InvalidArgumentError: One has not.
    """
    if any(size != count for size in sizes):
        raise InvalidArgumentError(
            f"{name} holds arrays of {list(sizes)} elements, expected {count} each"
        )


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
