"""Imported first by the server that a trial's processes are forked from: puts the mutant in place.

The environment says which; see ``tools.mutate``. What a rank of the tests needs is imported next,
since a server that has done so starts a rank in a tenth of a second.
"""

from __future__ import annotations

import os
from itertools import islice

from tools.mutate import PACKAGE, VARIABLE, install
from tools.mutations import mutants

if VARIABLE in os.environ:
    name, _, number = os.environ[VARIABLE].rpartition(":")
    file = (PACKAGE / name).resolve()
    found = mutants(file.read_text(encoding="utf-8"))
    install(file, next(islice(found, int(number), None)))

import megatron.core.models.gpt  # noqa: F401

import megatron_cg.tools.cpu.train  # noqa: F401
