"""Commands and what they need: never imported by the rooms of the core."""
