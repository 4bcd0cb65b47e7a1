"""From records of runs to one page to read; see ``docs/report.md``."""
