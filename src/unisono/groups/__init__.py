"""Objects with state: process groups, works, and torch.distributed's functions over them.

May import `backends`, `rendezvous`, `stores`, `base` and `errors`.
"""
