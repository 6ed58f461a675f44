"""Which algorithm a call takes: the rule, measured tables, hosts far apart, and the user's wish."""
