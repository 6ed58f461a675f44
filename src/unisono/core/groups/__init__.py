"""Process groups: their ranks, their life and end, the default group, ranks that come and go."""
