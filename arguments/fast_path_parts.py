"""The parts of the fast path that a run may choose, and which part needs which other. Pure.

``megatron_cg/fastpath/install_parts.py`` installs them; ``docs/fast_path.md`` describes each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from megatron_cg.nearest import did_you_mean

NEEDS: Mapping[str, tuple[str, ...]] = {
    "last-unit": (),
    "gradients": ("unshard",),
    "detached-weights": ("gradients",),
    "detached-weights-of-graphs": ("gradients",),
    "gemm-heuristics": (),
    "unshard": (),
    "gathers": (),
    "deferred-prefetch": ("detached-weights-of-graphs", "gathers"),
    "main-gradients": (),
    "main-weights": (),
    "clipping": (),
    "optimizer": (),
}
"""The parts that each part needs. ``unshard`` reports the end of a unit's backward pass, on which
``gradients`` relies. ``detached-weights-of-graphs`` reports the launch of a graph, after which a
deferred gather is issued."""
PARTS = tuple(NEEDS)


def chosen_parts(fast_path: bool | Collection[str]) -> frozenset[str]:
    """The parts that ``fast_path`` selects: all for True, none for False, or those it names."""
    if isinstance(fast_path, bool):
        return frozenset(PARTS if fast_path else ())
    return frozenset(fast_path)


def with_dependents(part: str) -> frozenset[str]:
    """``part`` and every part that cannot be installed without it."""
    found = {part}
    while more := {name for name, needs in NEEDS.items() if found & set(needs)} - found:
        found |= more
    return frozenset(found)


def mistakes(names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """What is wrong with a choice of parts: what was found, why it is wrong, what to name instead.

    An unknown name is reported alone, since it may be the part that another one needs.
    """
    unknown = [name for name in names if name not in NEEDS]
    for name in unknown:
        yield (
            f"{name!r}{did_you_mean(name, PARTS)}",
            "the fast path has no part of that name",
            f"choose from {', '.join(PARTS)}",
        )
    for name in () if unknown else names:
        missing = [need for need in NEEDS[name] if need not in names]
        if missing:
            yield (
                f"{name!r} without {' and '.join(map(repr, missing))}",
                f"{name} works only together with {' and '.join(missing)}",
                f"add {','.join(missing)}, or leave {name} out",
            )
