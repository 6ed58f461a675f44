"""Objects with state: process groups with their operations, worlds, works, the dispatcher."""
