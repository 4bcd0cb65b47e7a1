"""Ways to break or interrupt a run on purpose, for ``tests/functional/tampered.py``.

Each is a function that changes Megatron, torch or this package in the process that is going to
train, and is never undone: the process is its own.
"""
