"""One MoE layer's way: Megatron's dispatcher and experts, and the same in a graph."""

from __future__ import annotations

from itertools import pairwise

from tools.drawings.svg import Drawing

_MEGATRON = (
    ("gpu", "router: top-k experts of each token"),
    ("host", "rows for each rank,\nread on the host"),
    ("gpu", "gather rows by expert"),
    ("gather", "all-to-all, as many rows\nas the host has read"),
    ("host", "rows of each expert,\nread on the host"),
    ("gpu", "one GEMM for each expert:\nup, activation, down"),
    ("gather", "all-to-all back"),
    ("gpu", "add the rows of each token"),
)
_GRAPH = (
    ("gpu", "router: top-k experts of each token"),
    ("gather", "counts of all ranks,\nkept on the GPU"),
    ("gpu", "gather rows by rank and expert\ninto slots of a fixed size"),
    ("gather", "all-to-all of whole slots"),
    ("gpu", "gather the rows by expert\nout of the slots"),
    ("gpu", "one grouped GEMM for all experts:\nup, activation, down"),
    ("gather", "all-to-all of whole slots back"),
    ("gpu", "add the rows of each token"),
)
_LEFT, _RIGHT, _WIDTH = 8.0, 330.0, 270.0
_TOP, _HEIGHT, _PITCH = 44.0, 40.0, 58.0


def experts() -> Drawing:
    """What a dropless MoE layer does in its forward pass, without a graph and inside one."""
    height = _TOP + len(_GRAPH) * _PITCH + 6
    drawing = Drawing(610, height, "A dropless MoE layer: Megatron's way, and its way in a graph")
    drawing.text(_LEFT, 20, "Megatron: not in a graph", style="head")
    drawing.text(_RIGHT, 20, "Here: one CUDA graph", style="head")
    frame = [(_RIGHT - 10, _TOP - 10), (_RIGHT + _WIDTH + 8, _TOP - 10)]
    bottom = _TOP + len(_GRAPH) * _PITCH - 8
    frame += [(_RIGHT + _WIDTH + 8, bottom), (_RIGHT - 10, bottom), frame[0]]
    drawing.line(frame, dash=True)
    tops = [_TOP + number * _PITCH for number in range(len(_GRAPH))]
    for x, column in ((_LEFT, _MEGATRON), (_RIGHT, _GRAPH)):
        for y, (kind, label) in zip(tops, column, strict=True):
            drawing.box(x, y, _WIDTH, _HEIGHT, label, kind=kind)
        for y, after in pairwise(tops):
            drawing.arrow([(x + _WIDTH / 2, y + _HEIGHT), (x + _WIDTH / 2, after)])
    return drawing
