"""`unisono doctor`: examine hosts and the network between them before a job."""
