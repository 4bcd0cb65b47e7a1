"""Artifacts on disk: what is checked, and what is trusted, before anything is decoded.

Note [What is trusted]
    The artifact is a pickle of torch's, so decoding it can run any code. Two ways make it trusted:

    * the user gives the SHA-256 of the manifest, which ``save`` has returned. The manifest has the
      SHA-256 of the artifact, so nothing else on disk needs to be trusted.
    * otherwise the folder and both files must belong to this user or to root, and nobody else may
      write them, as OpenSSH asks of its keys. Who can write them could as well change the user's
      scripts. Access control lists are not looked at.

    The checksum in the manifest alone finds damage, not an attacker, who would change both. The
    bytes that are checked are the bytes that are decoded: each file is read once.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from megatron_cg.errors import ArtifactRefusedError, PrecompileError
from megatron_cg.files import whole_file, write_text

FORMAT = 2
"""Of the manifest. A change of its fields is another format; 1 had no ``seconds``."""


@dataclass(frozen=True)
class Manifest:
    """What is known of an artifact without decoding it."""

    name: str
    artifact_sha256: str
    artifact_bytes: int
    fingerprint: Mapping[str, str]
    roles: tuple[str, ...]
    """The roles whose groups the code uses."""
    traced_ranks: tuple[int, ...]
    world_size: int
    code_sha256: str
    """Of the traced operations and constants, which were the same on all traced ranks."""
    sources: tuple[tuple[str, int, int, str], ...]
    """Of each piece of source that was traced: module, first line, line after the last, SHA-256."""
    seconds: float
    """How long tracing took, of all ranks that were traced."""
    format: int = FORMAT


@dataclass(frozen=True)
class Stored:
    """A checked artifact, still encoded."""

    manifest: Manifest
    manifest_sha256: str
    data: bytes


def paths(directory: Path, name: str) -> tuple[Path, Path]:
    """Where the manifest and the artifact of that name are.

    Raises PrecompileError for a name that is not a plain file name.
    """
    if not name or Path(name).name != name or name.startswith("."):
        raise PrecompileError(f"{name!r} cannot name an artifact: use letters, digits and -")
    return directory / f"{name}.json", directory / f"{name}.artifact"


def write(directory: Path, manifest: Manifest, artifact: Path) -> str:
    """Put a file that torch has written, and its manifest, into the folder, for this user alone.

    Returns the SHA-256 of the manifest. Raises OSError.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    to_manifest, to_artifact = paths(directory, manifest.name)
    to_manifest.unlink(missing_ok=True)  # It would not fit what is written next.
    with whole_file(to_artifact) as part:
        part.write_bytes(artifact.read_bytes())
        part.chmod(0o600)
    text = json.dumps(asdict(manifest), indent=1, sort_keys=True) + "\n"
    write_text(to_manifest, text)
    to_manifest.chmod(0o600)
    return sha256(text.encode()).hexdigest()


def read(directory: Path, name: str, manifest_sha256: str | None = None) -> Stored:
    """Read an artifact and its manifest; nothing is decoded but the manifest, which is JSON.

    Args:
        directory: the folder.
        name: of the artifact.
        manifest_sha256: what ``save`` returned; see Note [What is trusted].

    Raises:
        ArtifactRefusedError: it is missing, not trusted, or damaged.
    """
    to_manifest, to_artifact = paths(directory, name)
    by_owner = manifest_sha256 is None
    if by_owner:
        _require_own(directory, os.stat(directory) if directory.exists() else None)
    text = _content(to_manifest, by_owner)
    found = sha256(text).hexdigest()
    if manifest_sha256 is not None and found != manifest_sha256:
        raise ArtifactRefusedError(
            f"{to_manifest} has the SHA-256 {found}, and {manifest_sha256} was given: it is not "
            "the manifest that save wrote. Copy it again, or save again"
        )
    manifest = _parsed(to_manifest, text)
    data = _content(to_artifact, by_owner)
    if len(data) != manifest.artifact_bytes or sha256(data).hexdigest() != manifest.artifact_sha256:
        raise ArtifactRefusedError(
            f"{to_artifact} is damaged, or of another manifest: it has {len(data)} bytes and the "
            f"SHA-256 {sha256(data).hexdigest()}, not {manifest.artifact_bytes} bytes and "
            f"{manifest.artifact_sha256}. Copy it again, or save again"
        )
    return Stored(manifest, found, data)


def _content(path: Path, by_owner: bool) -> bytes:
    try:
        with path.open("rb") as file:
            if by_owner:
                _require_own(path, os.fstat(file.fileno()))
            return file.read()
    except OSError as error:
        raise ArtifactRefusedError(
            f"{path} cannot be read ({error.strerror}): type megatron-cg precompile to make it"
        ) from error


def _require_own(path: Path, found: os.stat_result | None) -> None:
    if found is None:
        raise ArtifactRefusedError(
            f"there is no folder {path}: type megatron-cg precompile to make it"
        )
    if found.st_uid not in {os.geteuid(), 0}:
        raise ArtifactRefusedError(
            f"{path} belongs to user {found.st_uid} and not to you ({os.geteuid()}): decoding it "
            "could run that user's code. If you trust it, give the SHA-256 of the manifest that "
            "save printed (manifest_sha256)"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ArtifactRefusedError(
            f"other users may write {path}, and decoding it could run their code. Type chmod "
            f"go-w {path} if you trust what it holds now, or give the SHA-256 of the manifest that "
            "save printed (manifest_sha256)"
        )


def _parsed(path: Path, text: bytes) -> Manifest:
    try:
        fields: dict[str, Any] = json.loads(text)
        if fields["format"] != FORMAT:
            raise ArtifactRefusedError(
                f"{path} has format {fields['format']}, and this version of megatron_cg reads "
                f"{FORMAT}: save again"
            )
        fields["roles"] = tuple(fields["roles"])
        fields["traced_ranks"] = tuple(fields["traced_ranks"])
        fields["sources"] = tuple(
            (str(module), int(first), int(end), str(digest))
            for module, first, end, digest in fields["sources"]
        )
        return Manifest(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArtifactRefusedError(
            f"{path} is damaged, it is no manifest ({error}). Copy it again, or save again"
        ) from error
