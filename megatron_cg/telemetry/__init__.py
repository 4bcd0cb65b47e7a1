"""What a run reports: progress, one line after capture, counters, and its JSON record."""
