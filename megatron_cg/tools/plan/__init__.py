"""Shows what a run would capture and what that would cost, on any machine.

``request.py`` reads a preset or a command line. ``process.py`` makes the plan in a separate process
(``worker.py``). ``tables.py`` prints the plan.
"""
