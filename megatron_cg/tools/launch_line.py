"""Reads the launch line of a training, changes its flags, and writes it again. Pure.

A line is the text before the script (launcher, variables), the script, its flags, and the text
after them. It may lie in a word of another line: ``srun bash -c 'python pretrain_gpt.py ...'``.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Self

from megatron_cg.errors import MegatronCGError

GPUS_PER_NODE = 8  # what a host is taken to have if the line does not say it
_SCRIPT = re.compile(r"(?<![^\s'\"])(['\"]?)([^\s'\"=;]+\.py)\1(?=[\s'\"]|$)")
_VALUE = r"=('[^']*'|\"[^\"]*\"|[^\s;&]*)"
_VARIABLE = re.compile(rf"(?<![^\s;&'\"])([A-Za-z_]\w*){_VALUE}")
_ARGUMENTS = re.compile(r"(?:'[^']*'|\"[^\"]*\"|(?!\d?>)[^;&|\n])*")
"""Up to the end of the command, which may be in no quotes."""
_LAUNCHER = re.compile(r"(?<!\S)(-m ?|--module[ =])megatron_cg\s+")
_PYTHON = re.compile(
    r"(?:^|[/\s])(python[\d.]*|torchrun|torch\.distributed\.(?:run|launch)|ft_launcher|deepspeed|"
    r"accelerate)(?=[\s.-]|$)"
)
_MODULE = {"deepspeed": "--no_local_rank --module", "torch.distributed.launch": "--use-env -m"}
_TORCHRUN = re.compile(r"(torchrun|torch\.distributed\.\w+|ft_launcher|deepspeed)\s")
_TASKS = re.compile(r"(srun|mpirun|mpiexec)\s")

_NO_SCRIPT = (
    "give after a bare -- the whole command that starts the run, with its script (a name that ends "
    "with .py) and flags: torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ... In a "
    "shell script, write megatron-cg ... -- before torchrun or python. For other trainings see "
    "docs/graph_units.md and docs/clients.md"
)
MEGATRONS = ("pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py")
"""Scripts of Megatron that train GPT models, and add no flags but those of ModelOpt."""
_OTHERS = re.compile(
    r"--deepspeed|--zero-stage|--ds[-_]|\bverl\b|\bslime\b|\bactor_rollout_ref\.|main_(ppo|dapo)|"
    r"run_grpo|nemo_rl|openrlhf|train_rl|--perform-rl-step|--rollout-|--actor-num-|\bnemo llm\b|"
    r"\bmegatron (sft|pt|rlhf)\b|torchtitan|run_train\.sh|--(job|training|parallelism)\.|"
    r"megatron[-_./]bridge|run_recipe|run_script|setup_experiment|--recipe\b|"
    r"\s(model|ddp|dist|train)\.\w+=|\b(transformers|trl|swift)\b|axolotl|llamafactory|"
    r"--model_name|run_(clm|mlm|sft|dpo)|automodel|pretrain_(bert|t5|vlm|ict|retro|vision|mimo)|"
    r"/(bert|t5|retro|multimodal|mimo)/|(inference|generat\w*|server)\w*\.py",
    re.IGNORECASE,
)
"""What scripts, modules and flags of other trainings are called."""


class LaunchLineError(MegatronCGError):
    """The line has no script, or its flags cannot be read."""


@dataclass(frozen=True)
class Flag:
    name: str
    values: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        return [self.name, *self.values] if self.name else [*self.values]

    def __str__(self) -> str:
        return " ".join([self.name, *map(quoted, self.values)]).strip()


@dataclass(frozen=True)
class LaunchLine:
    """A launch line in parts. ``outer`` is what surrounds it if it is a word of another line."""

    before: str
    script: str
    flags: tuple[Flag, ...]
    after: str = ""
    outer: tuple[str, str] = ("", "")

    @property
    def words(self) -> list[str]:
        return [word for flag in self.flags for word in flag.words]

    @property
    def command(self) -> list[str]:
        """The whole line as the words of a process, which has no shell to set variables."""
        words = shlex.split(self._text(" "))
        return ["env", *words] if _VARIABLE.match(words[0]) else words

    @property
    def variables(self) -> dict[str, str]:
        assignments = _VARIABLE.findall(f"{self.outer[0]} {self.before}")
        return {name: value.strip("'\"") for name, value in assignments}

    @property
    def starts_graphs(self) -> bool:
        """Whether the line starts this package, or the script does so itself."""
        return bool(_LAUNCHER.search(self.before)) or "megatron_cg" in self.source

    @property
    def source(self) -> str:
        """The script's text; empty if it is not on this machine."""
        script = Path(self.script)
        return script.read_text("utf-8", "replace") if script.is_file() else ""

    def values(self, name: str) -> tuple[str, ...] | None:
        """The values of a flag, as the parser takes them: those of its last use; None without."""
        return next((flag.values for flag in reversed(self.flags) if flag.name == name), None)

    def has(self, name: str) -> bool:
        return self.values(name) is not None

    def kept(self, wanted: Callable[[str], bool]) -> Self:
        return replace(self, flags=tuple(flag for flag in self.flags if wanted(flag.name)))

    def without(self, *names: str) -> Self:
        """The line without these flags; a name may have wildcards."""
        return self.kept(lambda given: not any(fnmatchcase(given, name) for name in names))

    def followed_by(self, *words: str) -> Self:
        """The line with flags at its end, where they override others."""
        return replace(self, flags=(*self.flags, *read_flags(words)))

    def with_flag(self, name: str, *values: str) -> Self:
        names, others = [given.name for given in self.flags], self.without(name).flags
        at = names.index(name) if name in names else len(names)
        return replace(self, flags=(*others[:at], Flag(name, values), *others[at:]))

    def with_variable(self, name: str, value: str) -> Self:
        """The line with a variable set, where it sets it already or before its command."""
        pattern = re.compile(rf"(?<![^\s;&'\"]){name}{_VALUE}")
        if name in self.variables:
            outer = pattern.sub(f"{name}={value}", self.outer[0])
            before = pattern.sub(f"{name}={value}", self.before)
            return replace(self, before=before, outer=(outer, self.outer[1]))
        starts = re.finditer(r"[;&\n]\s*|\bmpirun\s+", self.before)
        start = max((found.end() for found in starts), default=0)
        # To other hosts, mpirun hands on only what -x names.
        option = "-x " if self.before[:start].rstrip().endswith("mpirun") else ""
        before = f"{self.before[:start]}{option}{name}={value} {self.before[start:]}"
        return replace(self, before=before)

    def with_launcher(self) -> Self:
        started = _PYTHON.findall(self.before)
        # Some put the rank's number before the script, unless they are told not to.
        way = _MODULE.get(started[-1], "-m") if started else "python -m"
        return replace(self, before=f"{self.before}{way} megatron_cg ")

    def without_launcher(self) -> Self:
        return replace(self, before=_LAUNCHER.sub("", self.before))

    def __str__(self) -> str:
        return self._text(" \\\n    ")

    def _text(self, between: str) -> str:
        parts = [f"{self.before}{shlex.quote(self.script)}", *map(str, self.flags), self.after]
        if self.outer == ("", ""):
            return between.join(filter(None, parts))
        return f"{self.outer[0]}{shlex.quote(' '.join(filter(None, parts)))}{self.outer[1]}"


def read_line(words: Sequence[str]) -> LaunchLine:
    """The launch line of a command's words, or of one word that is a whole line.

    Raises LaunchLineError if there is no script in it.
    """
    kept = [word for word in words if word.strip(" \\\n")]
    return _from_text(kept[0] if len(kept) == 1 else joined(kept))


def quoted(word: str) -> str:
    """The word as a shell reads it, which still expands a variable."""
    return f'"{word}"' if re.fullmatch(r'[^\s"]*\$[^\s"]*', word) else shlex.quote(word)


def joined(words: Sequence[str]) -> str:
    """Words as a shell reads them, with a space after the last; assignments stay assignments."""
    text = ""
    for word in words:
        name, equals, value = word.partition("=")
        is_variable = equals and re.fullmatch(r"[A-Za-z_]\w*", name)
        text += (f"{name}={quoted(value)}" if is_variable else quoted(word)) + " "
    return text


def _from_text(text: str) -> LaunchLine:
    """The line of a text for a shell, which may have other commands before and after it."""
    text = re.sub(r"\\\s*\n", " ", text).strip()
    for quoted_line in re.finditer(r"\s-l?c\s+((?:'[^']*'|\"[^\"]*\")+)", text):
        [inner] = shlex.split(quoted_line[1])
        if _SCRIPT.search(inner):
            outer = (text[: quoted_line.start(1)], text[quoted_line.end(1) :])
            return replace(_from_text(inner), outer=outer)
    script = _SCRIPT.search(text)
    if script is None:
        _check_known(text)
        raise LaunchLineError(_NO_SCRIPT)
    arguments = _ARGUMENTS.match(text, script.end())
    assert arguments is not None  # It may be empty.
    try:
        flags = read_flags(shlex.split(arguments[0]))
    except ValueError as error:
        raise LaunchLineError(f"the line cannot be read: {error}") from error
    line = LaunchLine(text[: script.start()], script[2], flags, text[arguments.end() :].strip())
    named = [re.match(r"--[\w.-]+|\+*[\w.]+=", word) for word in line.words]
    names = [name[0] for name in named if name]
    if Path(line.script).name not in MEGATRONS:
        names += [line.script, *re.findall(r"(?:-m|--module)[= ]\s*(\S+)", line.before)]
    if "megatron.training" not in (source := line.source):
        names += re.findall(r"(?m)^\s*(?:from|import) (\S+)", source)
    _check_known(f" {' '.join(names)}")
    return line


def _check_known(text: str) -> None:
    if found := _OTHERS.search(text):
        text = f"{found[0].strip(' =')}: only lines of Megatron's GPT training can be read"
        raise LaunchLineError(f"{text}; for others see docs/graph_units.md and docs/clients.md")


def read_flags(words: Sequence[str]) -> tuple[Flag, ...]:
    """Flags with their values; words before the first flag have an empty name."""
    flags: list[Flag] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            flags.append(Flag(name, (value,) if equals else ()))
        elif flags:
            flags[-1] = replace(flags[-1], values=(*flags[-1].values, word))
        else:
            flags.append(Flag("", (word,)))
    return tuple(flags)


@dataclass(frozen=True)
class Gpus:
    count: int
    per_node: int


def gpus_of(line: LaunchLine, count: int | None = None) -> Gpus:
    """The GPUs of a line's run; ``count`` is known from elsewhere.

    Raises LaunchLineError if nobody says how many there are.
    """
    text = f"{line.outer[0]} {line.before} "
    torchrun = _TORCHRUN.search(text)
    ranks = ("--nproc[-_]per[-_]node", "--num[-_](?:gpus|acc\\w+)")
    tasks = () if torchrun else ("--ntasks-per-node",)  # each starts a torchrun
    per_node = _number(text, *ranks, *tasks, "--gpus-per-node")
    nodes = _number(text, "--n?nodes", "--num[-_](?:nodes|machines)")
    if _TASKS.search(text):
        nodes = nodes or _number(text, "-N")
        count = count or (None if torchrun else _number(text, "-n", "--ntasks", "-np"))
    if torchrun and not re.search(r"\s(--nnodes|--num[-_]nodes|--hostfile|-H|--include|-i)", text):
        nodes = nodes or 1
    if world := _number(text, "--num[-_]processes"):
        count, per_node = count or world, world // (nodes or 1)
    if nodes and per_node:
        count = count or nodes * per_node
    elif (size := line.variables.get("WORLD_SIZE", "")).isdecimal():
        count = count or int(size)
    if not count:
        hint = ", or the line as the shell expands it" if "$" in text else ""
        text = "the line does not say how many GPUs there are: give --gpus N, before the bare --"
        raise LaunchLineError(f"{text}{hint}")
    return Gpus(count, per_node or GPUS_PER_NODE)


def _number(text: str, *options: str) -> int | None:
    """The number that one of these options has: ``-N 4``, ``-N4``, ``--nodes=4``."""
    for option in options:
        between = r"[= ]\s*" if option.startswith("--") else r"\s*"
        if given := re.search(rf"(?<!\S){option}{between}(\d+)(?=\s)", text):
            return int(given[1])
    return None
