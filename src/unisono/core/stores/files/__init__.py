"""FileStore: a log in one file, and the lock that guards it."""
