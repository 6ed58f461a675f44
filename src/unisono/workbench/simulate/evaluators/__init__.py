"""The ways to run a schedule in virtual time; all give the same times where they all apply."""
