"""CUDA graphs for units of any ``torch.nn.Module`` under the standalone megatron_fsdp package.

A training loop needs only :func:`graph_units`. Nothing of megatron-core is imported.
"""

from megatron_cg.units.graphs import GraphedUnits, graph_units

__all__ = ["GraphedUnits", "graph_units"]
