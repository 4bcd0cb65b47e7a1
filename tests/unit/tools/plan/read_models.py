"""Prints, for each preset, what its command line and its built model tell the rules: JSON.

Run it as a process of its own: the doubles of TE have to be installed before Megatron is imported.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import Any

from megatron_cg.tools.plan.worker import ready_to_plan


def read(name: str) -> dict[str, Any]:
    """The settings of one preset, read both ways, and what the model is refused for."""
    from megatron_cg.arguments.layout import available_scopes
    from megatron_cg.arguments.schema import Environment, GraphArguments
    from megatron_cg.arguments.validation import violations
    from megatron_cg.integrations.megatron import model_rules
    from megatron_cg.tools.cpu.fakes import replaced
    from megatron_cg.tools.plan.fake_machine import simulated_gpus
    from megatron_cg.tools.plan.meta_model import built_model
    from megatron_cg.tools.plan.request import read_request
    from megatron_cg.tools.plan.settings import read_settings

    with simulated_gpus():
        settings = read_settings(replace(read_request(name, []), nproc=None))
        given: list[Any] = []

        def noted(run: Any, *_others: Any) -> list[Any]:
            given.append(run)
            return []

        with (
            built_model(settings.args) as (model, _),
            replaced(model_rules, "violations", noted),
        ):
            model_rules.check_model(model, None, GraphArguments(), "tape")
    (run,) = given
    broken = violations(run, GraphArguments(), Environment())
    layouts = [[sorted(has) for has in available_scopes(r) or ()] for r in (settings.run, run)]
    return {
        "flags": asdict(settings.run),
        "model": asdict(run),
        "layouts": layouts,
        "refused": [violation.rule for violation in broken if "version" not in violation.rule],
    }


def main(names: list[str]) -> None:
    """Print what :func:`read` gives for each name."""
    with ready_to_plan():
        print(json.dumps({name: read(name) for name in names}))


if __name__ == "__main__":
    main(sys.argv[1:])
