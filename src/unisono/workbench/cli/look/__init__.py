"""`unisono top` and `unisono stacks`: look at running jobs that were not prepared for it."""
