"""Places in the user's program: lines of code, tracebacks and stacks."""
