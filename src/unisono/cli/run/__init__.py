"""The command `unisono run`."""
