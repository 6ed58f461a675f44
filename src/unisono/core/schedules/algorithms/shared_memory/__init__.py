"""The algorithms whose ranks read from each other's memory: one-shot, two-shot and their kin."""
