"""The algorithms whose ranks send messages: a file for each family, named as in the literature."""
