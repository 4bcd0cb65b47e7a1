"""Tensors of this package are where it says, whatever device is the default.

``--init-model-with-meta-device`` lets Megatron make layers inside of ``torch.device("meta")``, and
scripts call ``torch.set_default_device``.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import megatron_cg
from megatron_cg.tape.fakes import FACTORIES

ROOT = Path(megatron_cg.__file__).parent
MADE_FOR_TOOLS = ("tools", "tape")
"""They choose the default device of their own processes."""


def sources() -> list[Path]:
    found = sorted(ROOT.rglob("*.py"))
    return [file for file in found if file.relative_to(ROOT).parts[0] not in MADE_FOR_TOOLS]


def anywhere(source: str) -> Iterator[int]:
    """Lines of calls that leave the device of a new tensor to whoever calls."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in (*FACTORIES, "Generator")
            and not node.func.attr.endswith("_like")
            and all(keyword.arg not in ("device", None) for keyword in node.keywords)
        ):
            yield node.lineno


def test_each_new_tensor_names_its_device() -> None:
    files = sources()
    assert len(files) > 50
    found = [
        f"{file.relative_to(ROOT)}:{line}" for file in files for line in anywhere(file.read_text())
    ]
    assert not found
