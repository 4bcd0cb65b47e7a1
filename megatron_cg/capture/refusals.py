"""Reports what CUDA refused in a capture, by module and line.

Note [Two errors]
    CUDA refuses a read on the host, such as ``.item()``, in the call itself, so its error is raised
    in the model's own frame. Ending the capture then raises a second error, "operation failed due
    to a previous error during capture", and the caller receives the second one
    (``torch.cuda.graph``, torch 2.11, cannot end an invalidated capture in another way). Python
    keeps the first error as its context.

Note [Backward passes]
    Autograd runs backward passes outside of modules: only a ``torch.autograd.Function`` written in
    Python has a source line. Capture-time hooks show which unit was running.

Relied on: every text of CUDA's errors 900 to 908 (``cudaErrorStreamCapture*``) and of torch's own
checks ("during CUDA graph capture") has "captur" in it. Python code of other packages (Triton, TE)
raises them as a RuntimeError with that text.
"""

import traceback
from collections.abc import Iterator, Sequence

from torch import nn

from megatron_cg.backends.places import Place, place_of
from megatron_cg.errors import CaptureError, MegatronCGError
from megatron_cg.replay.unit import Unit

_REASON = (
    "A graph holds kernels and no host code: what reads or waits for the GPU (.item(), .cpu(), a "
    "condition on a tensor, printing one) cannot be in it, nor can a copy from memory that is not "
    "pinned or a kernel that is compiled or loaded at its first call."
)
_NOT_REGISTERED = "CUDA generator not in capture mode"
"""torch's error for a draw from a generator that is not registered with the graph."""
_OF_GENERATOR = (
    "It draws from a torch.Generator that the graph does not know. Keep it as an attribute of a "
    "captured module, or as a state of Megatron's RNG tracker, or draw from the device's own "
    "generator. Or:"
)
_LEAF = "a leaf Variable that requires grad is being used in an in-place operation"
"""torch's error for that: samples are leaves."""


def refusal(error: BaseException, unit: Unit, in_backward: bool) -> CaptureError | None:
    """An error that says what CUDA refused in the capture of ``unit``; None for other errors.

    If another error ended the capture first, such as out of memory, CUDA refused only what
    followed. The returned error then reports that first error, which ``error`` itself would hide.
    The frames of ``error`` must not be cleared yet.
    """
    errors = list(chain(error))
    if any(_LEAF in str(one) for one in errors):
        return unit.refused(
            "writes into an argument that needs a gradient, but a graph would write into its own "
            "copy",
            "Return the new values instead, or write into a clone.",
        )
    if isinstance(error, MegatronCGError) or not any(map(_is_refusal, errors)):
        return None
    first, place = _first(errors, unit.layer)
    where = f"the {'backward' if in_backward else 'forward'} pass of {unit.name}"
    module: nn.Module | None = None
    if place is not None:
        module = place.module
        # A unit's backward pass has no module, so only its line is known.
        said = place.source if module is None else str(place)
        where += f", in {said}" if said else ""
    text = str(first).partition("\n")[0]
    if not _is_refusal(first):
        return CaptureError(f"Capture of {where} failed ({type(first).__name__}: {text}).")
    reason = _OF_GENERATOR if _NOT_REGISTERED in text else _REASON
    return CaptureError(
        f"CUDA cannot capture {where} ({type(first).__name__}: {text}). {reason} "
        f"{unit.leave_out(module)}"
    )


def chain(error: BaseException) -> Iterator[BaseException]:
    """``error``, its cause or context, and so on back to the first error."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def clear_frames(error: BaseException) -> None:
    """Release what the frames of ``error`` and of its chain hold, such as incomplete graphs.

    Read the places of the errors before this call.
    """
    for link in chain(error):
        traceback.clear_frames(link.__traceback__)


def _is_refusal(error: BaseException) -> bool:
    # Any other class is an error of the model, whatever its text says.
    package = type(error).__module__.partition(".")[0]
    made_for_it = isinstance(error, RuntimeError) and package in ("builtins", "torch")
    return made_for_it and "captur" in str(error)


def _first(errors: Sequence[BaseException], root: nn.Module) -> tuple[BaseException, Place | None]:
    """The error that ended the capture.

    The first refusal in a module's code, else the first error there, else the first of all.
    """
    earliest = errors[::-1]
    placed = [(error, _place(error, root)) for error in earliest]
    inside = [(error, place) for error, place in placed if place is not None]
    refused = [(error, place) for error, place in inside if _is_refusal(error)]
    outside = [(error, place) for error, place in placed if _is_refusal(error)]
    return [*refused, *inside, *outside][0]


def _place(error: BaseException, root: nn.Module) -> Place | None:
    frames = list(traceback.walk_tb(error.__traceback__))
    return place_of(reversed(frames), root)
