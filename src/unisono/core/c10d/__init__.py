"""torch.distributed's functions over process groups."""
