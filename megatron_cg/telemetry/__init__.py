"""What a run reports: a line after capture, counters, and its record."""
