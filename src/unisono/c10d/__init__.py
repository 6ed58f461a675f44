"""torch.distributed's functions over process groups.

May import `groups`, `rendezvous`, `stores`, `base` and `errors`.
"""
