"""torch.distributed.elastic's path."""
