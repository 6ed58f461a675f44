"""The elastic rendezvous of the launcher's agents: a pure state machine, and the I/O around it."""
