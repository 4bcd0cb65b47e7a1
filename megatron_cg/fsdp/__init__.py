"""Megatron-FSDP's hooks: recognised, and passed to TE in the phases they belong to."""

from megatron_cg.fsdp.roles import FsdpRole, classify, fsdp_package_of
from megatron_cg.fsdp.transform import CaptureTimeHooks, UnitHooks, transform

__all__ = [
    "CaptureTimeHooks",
    "FsdpRole",
    "UnitHooks",
    "classify",
    "fsdp_package_of",
    "transform",
]
