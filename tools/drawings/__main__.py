"""Write all drawings into docs/drawings."""

from __future__ import annotations

from pathlib import Path

from tools.drawings import charts, experts, rooms, timelines

FOLDER = Path(__file__).parents[2] / "docs" / "drawings"
DRAWINGS = {
    "eager": timelines.eager,
    "capture": timelines.capture,
    "replay": timelines.replay,
    "run": timelines.run,
    "hooks": charts.hooks,
    "one-replay": charts.one_replay,
    "experts": experts.experts,
    "rooms": rooms.rooms,
}
"""File name, and what draws it."""


def main() -> None:
    """Write every drawing."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw().render(), encoding="utf-8")


if __name__ == "__main__":
    main()
