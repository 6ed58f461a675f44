"""What torch.distributed does not have: files, shared arrays, counters, steps, training."""
