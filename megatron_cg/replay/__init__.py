"""Runs a captured region: checks its guard, then replays its graph or falls back to eager."""
