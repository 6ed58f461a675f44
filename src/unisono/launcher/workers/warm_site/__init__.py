"""Folder that a warm worker's interpreter has on its path; see `sitecustomize` in it."""
