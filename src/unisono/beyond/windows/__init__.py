"""One-sided memory: a rank reads and writes the memory of other ranks, which need not call."""
