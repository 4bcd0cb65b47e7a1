"""The drawings that are not timelines: where each hook goes, and what is asked before a replay."""

from __future__ import annotations

from itertools import pairwise

from tools.drawings.svg import Drawing

_ROWS = (
    ("forward pre-hook\n_pre_forward_param_unshard", "forward_pre_hooks", "runs before the graph"),
    ("forward hook\n_post_forward", "forward_hooks", "runs after the graph"),
    (
        "forward hook that hangs on the output\n_pre_backward_param_unshard",
        "backward_pre_hooks",
        "runs before the\nbackward graph",
    ),
    (
        "forward pre-hook that hangs on the input\n_post_backward_release_module",
        "backward_hooks",
        "runs after the\nbackward graph",
    ),
    (
        "parameters' hooks\n(post-accumulate-grad)",
        "off",
        "fire on the gradients\nthat the graph returns",
    ),
)
_COLUMNS = ((8.0, 330.0), (390.0, 200.0), (650.0, 250.0))
_HEADS = ("On a layer under Megatron-FSDP", "At capture, TE's key", "At replay")


def hooks() -> Drawing:
    """Where each hook of Megatron-FSDP goes."""
    height = 48 + len(_ROWS) * 58.0
    drawing = Drawing(910, height, "Each hook of a layer, at capture and at replay")
    for (x, _), head in zip(_COLUMNS, _HEADS, strict=True):
        drawing.text(x, 20, head, style="head")
    for number, row in enumerate(_ROWS):
        y = 36 + number * 58.0
        for (x, width), label, kind in zip(_COLUMNS, row, ("hook", "note", "graph"), strict=True):
            drawing.box(x, y, width, 44, label, kind=kind)
        for (x, width), (after, _) in pairwise(_COLUMNS):
            drawing.arrow([(x + width, y + 22), (after, y + 22)])
    return drawing


def one_replay() -> Drawing:
    """What is asked before a graph is replayed, and what follows each answer."""
    d = Drawing(960, 760, "What is asked before a graph is replayed")
    d.box(40, 10, 260, 44, "layer(...):\nFSDP's hooks unshard", kind="hook")
    d.diamond(80, 84, 180, 60, "training?")
    d.diamond(80, 174, 180, 60, "only tensors?")
    d.diamond(80, 264, 180, 60, "guard")
    d.diamond(80, 354, 180, 74, "verification\ndue?")
    d.box(90, 470, 160, 40, "replay", kind="graph")
    d.diamond(70, 550, 200, 84, "before backward:\naddresses")
    d.box(40, 672, 260, 60, "backward replay;\nFSDP reduces gradients", kind="graph")
    d.box(390, 92, 220, 44, "the layer's own forward", kind="host")
    d.diamond(380, 340, 240, 102, "eager pass and\nreplay, bit for bit")
    d.diamond(380, 176, 240, 126, "mismatch: counted,\nreported once\n--cg-on-mismatch")
    d.box(720, 560, 220, 64, "the run ends with\nReplayMismatchError", kind="guard")
    d.diamond(700, 190, 240, 98, "collectives\nin the graph?")
    d.diamond(700, 360, 240, 98, "do all ranks\nleave it now?")
    d.box(720, 92, 200, 44, "the same part, eagerly", kind="host")
    _main_line(d)
    _side_lines(d)
    return d


def _main_line(d: Drawing) -> None:
    down = ((54, 84), (144, 174), (234, 264), (324, 354), (428, 470), (510, 550), (634, 672))
    for start, end in down:
        d.arrow([(170, start), (170, end)])
    labels = (
        (162, "yes"),
        (252, "yes"),
        (342, "as at capture"),
        (448, "no"),
        (655, "as at capture"),
    )
    for y, label in labels:
        d.text(176, y, label, style="soft")


def _side_lines(d: Drawing) -> None:
    d.arrow([(260, 114), (390, 114)])
    d.text(268, 108, "no", style="soft")
    d.arrow([(260, 204), (330, 204), (330, 239), (380, 239)])
    d.text(268, 198, "no", style="soft")
    d.line([(260, 294), (330, 294), (330, 239)])
    d.text(264, 288, "mismatch", style="soft")
    d.arrow([(260, 391), (380, 391)])
    d.text(268, 385, "yes", style="soft")
    d.arrow([(500, 340), (500, 302)])
    d.text(506, 326, "different", style="soft")
    d.arrow([(500, 442), (500, 490), (250, 490)])
    d.text(506, 462, "equal", style="soft")
    d.arrow([(620, 239), (700, 239)])
    d.text(624, 218, "eager,", style="soft")
    d.text(624, 233, "recapture", style="soft")
    d.arrow([(620, 239), (650, 239), (650, 592), (720, 592)])
    d.text(656, 500, "error", style="soft")
    d.arrow([(820, 190), (820, 136)])
    d.text(826, 168, "no", style="soft")
    d.arrow([(820, 288), (820, 360)])
    d.text(826, 328, "yes", style="soft")
    d.arrow([(940, 409), (952, 409), (952, 114), (920, 114)])
    d.text(916, 392, "yes", style="soft")
    d.arrow([(820, 458), (820, 560)])
    d.text(826, 512, "no", style="soft")
    d.arrow([(270, 592), (640, 592), (640, 610), (720, 610)])
    d.text(278, 586, "elsewhere", style="soft")
