"""What a run shows of itself: progress, one line after capture, counters, and its JSON."""
