"""Versions that were never seen: a notice where all is there, a message where something is gone."""

from pathlib import Path

import pytest

from megatron_cg import __main__ as launcher
from megatron_cg.arguments.rules import unseen_versions
from megatron_cg.arguments.schema import Environment
from tests.unit.arguments.good_configuration import megatron_parser

INSTALLED = {
    "megatron-core": "0.20.0",
    "megatron-fsdp": "0.6.1",
    "transformer-engine": "2.21.0",
    "torch": "2.11.0",
}


def test_a_symbol_that_is_gone_ends_the_launcher_with_package_version_symbol_and_what_to_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from megatron.training import arguments

    # Megatron, which asks for versions too, is to be imported with those that are there.
    megatron_parser()
    for module in ("upstream.symbols", "arguments.schema"):
        monkeypatch.setattr(f"megatron_cg.{module}.installed_version", INSTALLED.get)
    monkeypatch.delattr(arguments, "add_megatron_arguments")
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError('the script was run')")
    monkeypatch.setattr("sys.argv", ["megatron_cg", str(script)])
    with pytest.raises(SystemExit) as ended:
        launcher.main()
    message = str(ended.value)
    assert "megatron-core 0.20.0" in message
    assert "megatron.training.arguments:add_megatron_arguments" in message
    assert "megatron-cg doctor" in message


@pytest.mark.parametrize(
    ("package", "version", "backend", "said"),
    [
        ("torch", "2.14.1+cpu", "tape", []),
        ("torch", "2.14.1", "transformer_engine", ["on the CPU tape alone, 2.11.0 on GPUs"]),
        ("torch", "2.99.0", "tape", ["was never run with this package, 2.11.0 was"]),
        ("torch", "odd", "tape", ["was never run"]),
        ("megatron-core", "0.20.0", "tape", []),
        ("megatron-core", "0.20.0rc1", "native", ["only as main at d98e8a64 of 2026-08-22"]),
        ("megatron-core", "0.21.0", "tape", ["was never run with this package, 0.19.2 was"]),
    ],
)
def test_a_version_that_ran_in_part_is_told_on_gpus(
    package: str, version: str, backend: str, said: list[str]
) -> None:
    found = list(unseen_versions(Environment(versions={package: version}, backend=backend)))
    assert len(found) == len(said) and all(map(str.__contains__, found, said))
