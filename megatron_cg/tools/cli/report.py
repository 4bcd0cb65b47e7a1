"""Make one HTML page of a run, or of two: losses, times, memory, graphs.

DIR is what 'megatron-cg align --work-dir' or a run with --cg-report or --cg-record has left. The
page loads nothing, from no network and no other file. Exit code 0: written; 2: cannot be done.
"""

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from megatron_cg.errors import MegatronCGError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="records of a run, or of align's two")
    add("--against", type=Path, metavar="DIR2", help="another run, the eager one, as the reference")
    add("--out", type=Path, metavar="FILE", help="the page (default DIR/report.html)")


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    if importlib.util.find_spec("matplotlib") is None:
        raise MegatronCGError("the plots need matplotlib: pip install 'megatron-cg[report]'.")
    from megatron_cg.files import whole_file
    from megatron_cg.tools.report.report_page import page, read_story

    story = read_story(args.directory, args.against)
    out = args.out or args.directory / "report.html"
    with whole_file(out) as part:
        part.write_text(page(story), encoding="utf-8")
    print(f"written: {out}")
    return 0
