"""The worker processes of one host: how they start, where they run, and what is left of them."""
