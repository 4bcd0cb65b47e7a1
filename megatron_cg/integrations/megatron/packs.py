"""Packed sequences in graphs of attention: a pack's boundaries as tensors of a fixed shape.

Megatron gives each layer a ``PackedSeqParams`` for each microbatch. It has boundaries (int32
tensors of the number of samples + 1) and the length of the longest sample, a Python number. A graph
takes tensors of one shape and runs no Python. So a graph has room for a number of samples. Its
boundaries are inputs: behind those of a pack the last one is repeated, as samples without tokens.
Its longest sample is as long as the pack, which bounds the length of any.

Note [Where a pack is prepared]
    Once for each pass of the model, before its embedding. The model makes its rotary table as long
    as the longest sample, and a graph takes tables of one length. So eager layers of such a pass
    get that bound too. Their boundaries stay as they are: prediction of several tokens reads them
    on the host, one sample after another.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn

from megatron_cg.capture.session import Session
from megatron_cg.consensus.decision import Kind, Vote, digest
from megatron_cg.consensus.exchange import TIMEOUT, Agreement
from megatron_cg.errors import CaptureError, say
from megatron_cg.replay.guard import Mismatch, described
from megatron_cg.replay.mismatch_policy import MismatchPolicy
from megatron_cg.replay.plain import is_plain
from megatron_cg.upstream.patch import Undo, combined_undo, replace_function
from megatron_cg.upstream.symbols import Symbol
from megatron_cg.upstream.te import fuses_attention

PACK = "packed_seq_params"
"""The keyword by which a layer gets the boundaries of packed sequences, in an object."""
_LONGEST = ("max_seqlen_q", "max_seqlen_kv")
_BOUNDARIES = "cu_seqlens_"
_OF_MAMBA = ("seq_idx", "total_tokens")
_SAMPLE = "tokens_per_sample"
RELIES_ON = (
    Symbol(
        "megatron.core.packed_seq_params:PackedSeqParams",
        "the boundaries of a pack",
        attributes=(*_LONGEST, f"{_BOUNDARIES}q", f"{_BOUNDARIES}kv"),
    ),
)
_INPUTS = "_megatron_cg_inputs"
"""Where a prepared pack has what graphs get of it."""
_MORE, _MULTIPLE = 1.25, 8
"""Room for so many times the samples of the fullest pack before the capture, and its multiple."""
_NOT_FUSED = (
    "Transformer Engine does not compute attention of packs of {room} samples by cuDNN here, and "
    "the bits of its other kernels depend on the longest sample, which a graph does not know. Type "
    "{type:--attention-backend fused}; with {flag:--deterministic-mode} cuDNN also needs fewer "
    "samples: lower {flag:--cg-packed-samples}. Or leave attn out of {flag:--cuda-graph-modules}."
)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackForm:
    """What all packs of a run have in common."""

    constants: tuple[tuple[str, Any], ...]
    """The other fields that attention reads, but for the longest sample; of objects the class."""
    boundaries: tuple[tuple[str, ...], ...]
    """For each tensor of boundaries, the fields that have it: which kernel runs depends on that."""

    @classmethod
    def of(cls, pack: Any) -> "tuple[PackForm, list[torch.Tensor]]":
        constants, tensors = list[tuple[str, Any]](), dict[int, torch.Tensor]()
        names = dict[int, tuple[str, ...]]()
        for field in fields(pack):
            value = getattr(pack, field.name)
            if field.name.startswith(_BOUNDARIES) and isinstance(value, torch.Tensor):
                tensors[id(value)] = value
                names[id(value)] = (*names.get(id(value), ()), field.name)
            elif field.name not in (*_LONGEST, *_OF_MAMBA):
                constants.append((field.name, value if is_plain(value) else type(value)))
        return cls(tuple(constants), tuple(names.values())), list(tensors.values())

    def unfit(self, tokens: int) -> str:
        """The fields that no graph of packs of ``tokens`` tokens can take."""
        found = [name for name, value in self.constants if isinstance(value, type)]
        given = dict(self.constants)
        if given["qkv_format"] != "thd" or not self.boundaries:
            found.append("qkv_format")
        if (given.get(_SAMPLE) or tokens) < tokens:
            found.append(_SAMPLE)
        return ", ".join(found)


class ObservedPacks:
    """The packs of whole training steps."""

    def __init__(self) -> None:
        self.most = 0
        """The samples of the fullest one."""
        self.forms = list[PackForm]()
        self._last: Any = None

    def add(self, pack: Any) -> None:
        if pack is self._last or not isinstance(pack, PackedSeqParams):
            return
        self._last = pack
        form, boundaries = PackForm.of(pack)
        self.forms += [form] * (form not in self.forms)
        self.most = max(self.most, *(len(one) - 1 for one in boundaries), 0)


class Packs:
    """What graphs take of a model's packs, of up to ``tokens`` tokens and ``room`` samples."""

    def __init__(self, form: PackForm, room: int, tokens: int) -> None:
        self._form, self.room, self._tokens = form, room, tokens
        self._names = tuple(f"{PACK}.{names[0]}" for names in form.boundaries)
        self._mismatches: MismatchPolicy | None = None
        self._votes = False
        self._unfit: Mismatch | None = None

    def sample(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Inputs for a capture: one sample, and no token in the others."""
        made = torch.full((self.room + 1,), self._tokens, dtype=torch.int32, device=device)
        made[0] = 0
        return {name: made.clone() for name in self._names}

    def join(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a layer's call, from those of a graph."""
        made = object.__new__(PackedSeqParams)
        parts = dict(self._form.constants) | dict.fromkeys(_LONGEST, self._tokens)
        for field in fields(PackedSeqParams):
            setattr(made, field.name, parts.get(field.name))
        for name, names in zip(self._names, self._form.boundaries, strict=True):
            for one in names:
                setattr(made, one, kwargs[name])
        left = {name: value for name, value in kwargs.items() if name not in self._names}
        return left | {PACK: made}

    def split(self, kwargs: Mapping[str, Any]) -> dict[str, Any] | Mismatch:
        """The keywords of a graph, from those of a layer's call; the reverse of :meth:`join`."""
        given: dict[str, Any] | None = getattr(kwargs[PACK], _INPUTS, None)
        if given is None:
            other = "another", "Call the layers through the model."
            return self._unfit or _mismatch("a pack prepared by the model", *other)
        return {name: value for name, value in kwargs.items() if name != PACK} | given

    @combined_undo
    def install(self, model: nn.Module, layers: Sequence[Any]) -> Iterator[Undo]:
        """Let passes of ``model`` prepare packs, and ``layers`` take them in a capture."""
        for layer in layers:
            region = partial(self._joined, layer._te_cuda_graph_capture)
            yield replace_function(layer, "_te_cuda_graph_capture", region)
        for module in model.modules():
            if isinstance(module, LanguageModule):
                passes = partial(self._pass, module, module.forward)
                yield replace_function(module, "forward", passes)

    def begin(self, session: Session) -> None:
        """Prepare packs from now on, for the graphs of ``session``."""
        self._mismatches, self._votes = session.mismatches, session.holds_collectives

    def _joined(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._names[0] not in kwargs:
            return run(*args, **kwargs)
        try:
            result = run(*args, **self.join(kwargs))
        except ValueError as error:  # TE's, where flags allow no other kernel.
            if not fuses_attention():
                raise CaptureError(say(_NOT_FUSED, room=self.room)) from error
            raise
        if not fuses_attention():
            raise CaptureError(say(_NOT_FUSED, room=self.room))
        return result

    def _pass(self, model: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given, mismatches = kwargs.get(PACK), self._mismatches
        if mismatches is None or not model.training or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        if (given is not None or self._votes) and not mismatches.conditions.all_eager:
            found = self._boundaries_of(given)
            self._unfit = found if isinstance(found, Mismatch) else None
            # If it does not fit on one rank, all run theirs eagerly.
            if self._votes and mismatches.on_any_rank("a pack", self._unfit is not None, TIMEOUT):
                other = "one that does not, on another rank"
                self._unfit = self._unfit or _mismatch("one that fits", other, _REMEDY)
            if self._unfit is None and not isinstance(found, Mismatch):
                kwargs[PACK] = self._prepared(given, found)
        return run(*args, **kwargs)

    def _boundaries_of(self, pack: Any) -> list[torch.Tensor] | Mismatch:
        """A pack's boundaries, or why graphs cannot take it."""
        if not isinstance(pack, PackedSeqParams):
            return _mismatch("a pack", described(pack), "Pass packs in each step, or in none.")
        form, boundaries = PackForm.of(pack)
        parts = ((*one.constants, one.boundaries) for one in (self._form, form))
        for before, now in zip(*parts, strict=False):
            if before != now:
                return _mismatch(f"with {before}", f"with {now}", "Make all packs alike.")
        if any(one.dim() != 1 for one in boundaries):
            shapes = f"of shapes {[tuple(one.shape) for one in boundaries]}"
            return _mismatch("with boundaries in one row", shapes, "Give them in one dimension.")
        samples = max(len(one) for one in boundaries) - 1
        if samples > self.room:
            return _mismatch(f"of up to {self.room} samples", f"of {samples}", _REMEDY)
        longest = [value for name in _LONGEST if (value := getattr(pack, name)) is not None]
        if not all(type(one) is int and one <= self._tokens for one in longest):
            bound = f"of samples of up to {self._tokens} tokens"
            remedy = "Give numbers, and keep the sequence length of the capture."
            return _mismatch(bound, f"of {longest}", remedy)
        return boundaries

    def _prepared(self, pack: Any, boundaries: Sequence[torch.Tensor]) -> Any:
        made = copy.copy(pack)
        for name in _LONGEST:
            setattr(made, name, self._tokens)
        inputs = vars(made)[_INPUTS] = dict[str, torch.Tensor]()
        for name, one in zip(self._names, boundaries, strict=True):
            inputs[name] = torch.cat((one, one[-1:].expand(self.room + 1 - len(one))))
        return made


def _mismatch(expected: str, actual: str, remedy: str) -> Mismatch:
    return Mismatch("pack", "the pack of sequences", expected, actual, remedy)


_REMEDY = f"More samples than a graph has room for: raise {say('{flag:--cg-packed-samples}')}."


def agreed_packs(
    seen: ObservedPacks, agreement: Agreement, tokens: int, room: int | None
) -> Packs | None:
    """What graphs of all ranks take of packs; None if they take none. All ranks call it together.

    ``tokens`` are those of a pack. ``room`` is how many samples a graph has room for; None means a
    quarter more than ranks have seen. Raises AgreementError as a vote does.
    """
    form = seen.forms[0] if len(seen.forms) == 1 else None
    unfit = "" if form is None else form.unfit(tokens)
    vote = Vote(size=seen.most, graphs=digest([repr(form), unfit]))
    decision = agreement.agree(Kind.MISMATCH, vote, name="the samples of packs")
    if not decision.largest:
        return None
    if form is None or unfit or decision.minority:
        logger.warning(
            "megatron_cg: passes with packed sequences run attention eagerly: packs differ in more "
            "than boundaries between steps or ranks, or no graph takes %s of theirs.",
            unfit or "what is new",
        )
        return None
    wanted = _MULTIPLE * math.ceil(decision.largest * _MORE / _MULTIPLE)
    return Packs(form, room or min(wanted, tokens), tokens)
