"""Arrays from one sharding to another, by plans that are worked out once."""
