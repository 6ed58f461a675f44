"""The search for schedules: plans, their proof and time, and files of the best."""
