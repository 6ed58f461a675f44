"""Stores on key-value services that run elsewhere: etcd and Redis."""
