"""Plain Python values that a forward pass reads: compared by type and exact value.

A graph was captured with the branches and numbers that such values led to, and a replay repeats
them. ``==`` is not enough: 0.0 equals -0.0, 1 equals True, and NaN does not equal itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, Enum)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_SEQUENCES = (tuple, list)
_SETS = (set, frozenset)
_DEPTH = 4
"""How deep containers inside of containers are looked at."""


class _Identity:
    """Equal to itself for the same object only; keeps the object, so that no other gets its id."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def is_plain(value: Any) -> bool:
    """Whether ``value`` is of a type without parts, whose value cannot change in place."""
    return isinstance(value, (*_PLAIN, *_OF_TORCH))


def is_container(value: Any) -> bool:
    """Whether :func:`contents` looks into ``value``."""
    return isinstance(value, (*_SEQUENCES, *_SETS, dict))


def same_value(value: Any, other: Any) -> bool:
    """Whether two values, of any type, are the same for a forward pass that reads them."""
    if value is other:
        return True
    if type(value) is not type(other) or not (is_plain(value) or is_container(value)):
        return False
    return bool(contents(value) == contents(other))


def contents(value: Any, depth: int = _DEPTH) -> Any:
    """What of ``value`` a forward pass can depend on, comparable with ``==``.

    Objects that are neither plain nor containers count by identity, parameters not at all: the
    modules that own them are compared by themselves.
    """
    if isinstance(value, float | complex):
        return type(value), repr(value)
    if is_plain(value):
        return type(value), value
    if depth and isinstance(value, _SEQUENCES):
        return type(value), tuple([contents(inner, depth - 1) for inner in value])
    if depth and isinstance(value, Mapping):
        pairs = [(contents(key, 1), contents(value[key], depth - 1)) for key in value]
        return type(value), tuple(pairs)
    if depth and isinstance(value, _SETS):
        return type(value), frozenset([contents(inner, depth - 1) for inner in value])
    return nn.Parameter if isinstance(value, nn.Parameter) else _Identity(value)
