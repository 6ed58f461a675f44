"""What torch.distributed has: stores, rendezvous, groups, collectives, messages, records."""
