"""`unisono trace`: the recorded calls of all ranks on one time axis."""
