"""Folder on the path of a half-started worker's interpreter; see its `sitecustomize`."""
