"""torch.distributed.run's path: `python -m unisono.run` is `unisono run`."""

import sys
from collections.abc import Sequence

from unisono.workbench.cli.main import main as run_command


def main(args: Sequence[str] | None = None) -> None:
    """Run `unisono run` with arguments, by default those of this process; exit if it fails."""
    if code := run_command(["run", *(sys.argv[1:] if args is None else args)]):
        sys.exit(code)


if __name__ == "__main__":
    main()
