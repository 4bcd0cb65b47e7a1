"""Inside of one measured process: which steps are measured, and how."""
