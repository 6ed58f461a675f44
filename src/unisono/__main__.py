"""`python -m unisono` does what the command `unisono` does."""

import sys

from unisono.workbench.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
