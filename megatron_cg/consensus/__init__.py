"""Decisions of all ranks together: requests, votes and the decision."""
