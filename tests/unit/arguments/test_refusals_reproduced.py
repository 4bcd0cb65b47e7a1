"""What refusals say of the released packages, seen in their own code, or with a rule left out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.tools.cpu.launch import run_processes
from tests.unit.arguments.good_configuration import GOOD_ARGV, parse
from tests.unit.counted import expect
