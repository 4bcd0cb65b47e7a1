"""Installed versions, and the only place that looks up symbols of other packages.

A module that relies on another package gets each object from a :class:`Symbol`, and lists all of
them in a tuple ``RELIES_ON``, in which ``megatron-cg doctor`` looks.

Note [Fingerprints]
    The fingerprint of a function ignores its formatting. It stays the same if comments, docstrings,
    annotations or line breaks change, and for every version of Python that parses the function into
    the same syntax tree.
"""

import ast
import dis
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import blake2b
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

from megatron_cg.errors import UpstreamChangedError

_INSIDE = "<locals>"
_NOT_CODE = {"annotation", "returns", "type_comment", "type_params", "ctx", "kind"}
_WITH_DOCSTRING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
_NUMBERS = re.compile(r"^(?:MAJOR|MINOR|PATCH)\s*=\s*(\d+)", re.MULTILINE)
_PRE_RELEASE = re.compile(r"^PRE_RELEASE\s*=\s*[\"'](.*)[\"']", re.MULTILINE)
_WHOLE = re.compile(r"^__version__\s*=\s*[\"'](.+)[\"']", re.MULTILINE)


def installed_version(distribution: str) -> str | None:
    """The version of the copy of a package that is imported, or would be; None if there is none.

    pip's metadata may be of another copy than the one on the path. Nothing is imported to ask.
    """
    from importlib import metadata  # Slow to import, and not needed to print a command's help.

    inner = distribution.removeprefix("megatron-")
    in_megatron = distribution != inner and inner in ("core", "bridge")
    folder = folder_of(f"megatron.{inner}" if in_megatron else distribution.replace("-", "_"))
    version = version_in(folder) if folder is not None else None
    with suppress(metadata.PackageNotFoundError):
        return version or metadata.version(distribution)
    return version


def version_in(folder: Path) -> str | None:
    """The version that the sources of a package say, from ``package_info.py`` or ``version.py``."""
    for name in ("package_info.py", "version.py"):
        try:
            text = (folder / name).read_text(encoding="utf-8")
        except OSError:
            continue
        numbers, whole = _NUMBERS.findall(text), _WHOLE.search(text)
        if len(numbers) == 3:
            return ".".join(numbers) + "".join(_PRE_RELEASE.findall(text))
        if whole is not None:
            return whole[1]
    return None


def folder_of(package: str) -> Path | None:
    """Where a package was imported from, or would be; None if nowhere."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(package)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        return Path(places[0]) if places else None
    return None


def changed(distribution: str, symbol: str, expected: str) -> UpstreamChangedError:
    """The error for a symbol that is not as we rely on it, with the version that is imported."""
    version = installed_version(distribution) or "not installed"
    return UpstreamChangedError(distribution, version, symbol, expected)


def _distribution_of(path: str) -> str:
    package, inner = re.split(r"[.:]", f"{path}.", maxsplit=2)[:2]
    core = "megatron-bridge" if inner == "bridge" else "megatron-core"
    return core if package == "megatron" else package.replace("_", "-")


def lookup(path: str, expected: str) -> Any:
    """The object at ``module:attribute.path`` that we rely on in another package.

    Raises UpstreamChangedError, with package, version and symbol, if it is not there.
    """
    module_name, _, attributes = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for names in filter(None, attributes.split(".")):
            there = (name for name in names.split("|") if hasattr(found, name))
            found = getattr(found, next(there, names))
    except (ImportError, AttributeError) as error:
        raise changed(_distribution_of(path), path, expected) from error
    return found


@dataclass(frozen=True)
class Symbol:
    """A symbol of another package that one of our modules relies on.

    Its methods raise UpstreamChangedError if it is not there, or lacks a parameter or attribute.
    """

    path: str
    """``module:attribute.path``; ``<locals>.`` precedes an inner function; ``a|b`` as below."""
    expected: str
    """What we use it as, for messages."""
    parameters: tuple[str, ...] = ()
    """Names that its signature has, in this order; others may stand between them."""
    attributes: tuple[str, ...] = ()
    """Names that a class declares, or that its methods set, on instances or on modules; ``a|b`` is
    one that is ``b`` in later releases."""
    fingerprints: tuple[str, ...] = ()
    """For a function that we replace: fingerprints of its code in the releases that the replacement
    was written for. A different fingerprint is not an error: the replacement then stays off, and
    ``megatron-cg doctor`` prints it."""

    @property
    def distribution(self) -> str:
        """The distribution that has it, as pip names it."""
        return _distribution_of(self.path)

    def unknown_body(self) -> str | None:
        """Why our replacement of this function may do something else; None if it does the same."""
        if not self.fingerprints:
            return None
        found = self.find()
        if (other := _other_wrapper(found, self.path)) is not None:
            return f"{self.path} of {self.distribution} is wrapped by code of {other}"
        try:
            fingerprint = fingerprint_of(textwrap.dedent(inspect.getsource(found)))
        except (OSError, TypeError, SyntaxError):
            fingerprint = "unknown, as its source is not there"
        if fingerprint in self.fingerprints:
            return None
        version = installed_version(self.distribution) or "not installed"
        return (
            f"{self.path} of {self.distribution} {version} has another body than the releases that "
            f"this was written for (fingerprint {fingerprint})"
        )

    def require_known_body(self) -> None:
        """Raise UpstreamChangedError if our replacement may do something else than the function."""
        unknown = self.unknown_body()
        if unknown is not None:
            raise changed(self.distribution, self.path, unknown)

    def place(self) -> tuple[Any, str]:
        """The module or class that has the object, and its name there, to put another there."""
        self.find()
        module, _, path = self.path.partition(":")
        outer, _, name = path.rpartition(".")
        return lookup(f"{module}:{outer}", self.expected), name

    @cached_property
    def cached(self) -> Any:
        """The object as it was at the first call: for functions that are called often."""
        return self.find()

    def find(self) -> Any:
        """The object as it is now; for a function defined inside another, its code."""
        outer, _, inner = self.path.partition(f".{_INSIDE}.")
        found = lookup(outer, self.expected)
        for name in filter(None, inner.split(f".{_INSIDE}.")):
            found = next((code for code in _codes_in(found) if code.co_name == name), None)
            if found is None:
                raise changed(self.distribution, self.path, self.expected)
        if self.parameters and not _has_in_order(found, self.parameters):
            expected = f"{self.expected}, with the parameters {', '.join(self.parameters)}"
            raise changed(self.distribution, self.path, expected)
        for name in self.attributes:
            if not any(_has_attribute(found, one) for one in name.split("|")):
                expected = f"what has or sets an attribute {name}: {self.expected}"
                raise changed(self.distribution, f"{self.path}.{name}", expected)
        return found


def _has_in_order(function: Any, names: tuple[str, ...]) -> bool:
    try:
        there = iter(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return all(name in there for name in names)


def _other_wrapper(function: Any, path: str) -> str | None:
    """The module of code around an upstream function that our replacement would leave out."""
    known = {"contextlib", "functools", "torch", "megatron_cg", re.split(r"[.:]", path)[0]}
    while hasattr(function, "__wrapped__"):
        code = getattr(function, "func", function)  # replace_function() sets a partial
        code = code.__func__ if type(code) is MethodType else code
        # Not isinstance(): wrapt's wrappers pass on the class and the globals of what they wrap.
        plain = type(code) is FunctionType
        module: str = code.__globals__["__name__"] if plain else type(code).__module__
        if module.partition(".")[0] not in known:
            return module
        function = function.__wrapped__
    return None


def _codes_in(function: Any) -> Iterator[CodeType]:
    """The code of the functions defined directly in a function or in code, not of nested ones."""
    code = getattr(inspect.unwrap(function), "__code__", function)
    for constant in getattr(code, "co_consts", ()):
        if isinstance(constant, CodeType):
            yield constant


def _has_attribute(cls: Any, name: str) -> bool:
    """Whether instances of ``cls`` have ``name``, or its code sets it; runs none of its code."""
    if hasattr(cls, name):
        return True
    for owner in getattr(cls, "__mro__", ()):
        if name in getattr(owner, "__annotations__", {}):
            return True
        if any(_sets(member, name) for member in vars(owner).values() if callable(member)):
            return True
    return False


def _sets(function: Any, name: str) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", function)
    if not isinstance(code, CodeType):
        return False
    if any(step.opname == "STORE_ATTR" and step.argval == name for step in dis.Bytecode(code)):
        return True
    return any(_sets(inner, name) for inner in _codes_in(code))


@cache
def fingerprint_of(source: str) -> str:
    """The fingerprint of a function's source; see Note [Fingerprints]. Raises SyntaxError."""
    body = ast.parse(source).body
    return blake2b(_code(body[0] if len(body) == 1 else body).encode(), digest_size=8).hexdigest()


def _code(node: Any) -> str:
    if isinstance(node, list):
        return f"[{' '.join(map(_code, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _NOT_CODE}
    if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = fields["body"][1:]
    # Absent and empty count as equal: versions of Python differ in which one they use.
    kept = (f"{name}={_code(value)}" for name, value in fields.items() if value not in (None, []))
    return f"{type(node).__name__}({' '.join(kept)})"
