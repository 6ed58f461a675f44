"""What recorded calls mean: joined over ranks, on one time axis, with the rank that is late."""
