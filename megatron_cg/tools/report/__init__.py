"""``megatron-cg report``: one readable page of the records of a run or two; ``docs/report.md``."""
