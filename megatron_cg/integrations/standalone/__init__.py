"""CUDA graphs for units of any ``torch.nn.Module`` under the standalone megatron_fsdp package.

:func:`graph_units` is all that a training loop needs; no megatron-core is imported.
"""

from megatron_cg.integrations.standalone.graphs import GraphedUnits, graph_units

__all__ = ["GraphedUnits", "graph_units"]
