"""The flags and settings of a run with layerwise CUDA graphs, and the rules for them.

``megatron.py`` adds the flags to Megatron's parser and checks its namespace. Everything else here
is pure and imports neither torch nor Megatron.
"""
