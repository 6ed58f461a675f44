"""A run in virtual time as a picture or a page to step through."""
