"""CUDA graphs for units of any ``torch.nn.Module`` under the standalone megatron_fsdp package.

A training loop needs only ``graph_units`` of ``graphs.py``. Nothing of megatron-core is imported.
"""
