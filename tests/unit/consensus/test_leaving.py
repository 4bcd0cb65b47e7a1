"""The end of a process that is out of step with the other ranks."""

from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_cg.consensus import exchange
from megatron_cg.consensus.decision import AgreementError, Kind, Vote
from megatron_cg.consensus.exchange import Agreement
from tests.unit.interpreted import python
from tests.unit.ranks import ends, on_ranks

SCRIPT = """
import atexit, logging, threading
from megatron_cg.consensus import process_exit
from megatron_cg.consensus.process_exit import exit_without_waiting
process_exit.SECONDS = 0.5
# What the end of a process out of step meets: something that waits for other ranks for ever.
atexit.register(threading.Event().wait)
exit_without_waiting()
exit_without_waiting()
print("written")
raise RuntimeError("a hook raised")
"""


@pytest.mark.parametrize(
    "broken", ["", "os.close(1); os.close(2)", "sys.stdout = None", "sys.stdout.close()"]
)
def test_the_error_is_out_and_nothing_at_the_end_waits(broken: str) -> None:
    """Output that is broken keeps nobody either."""
    script = SCRIPT.replace('print("written")', f"import os, sys; print('written'); {broken}")
    ended = python(script)
    assert ended.returncode == 1
    if not broken:
        assert ended.stdout == "written\n" and "RuntimeError: a hook raised" in ended.stderr


LEFT = """
import atexit, multiprocessing, signal, sys, tempfile, threading, time
from pathlib import Path
from megatron_cg.consensus import process_exit
process_exit.SECONDS = float(sys.argv[3])
folder, ready = Path(sys.argv[1]), multiprocessing.Event()

def child():
    signal.signal(signal.SIGTERM, signal.SIG_DFL if sys.argv[2] == "ends" else signal.SIG_IGN)
    ready.set()
    time.sleep(600)

process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
process.start()
ready.wait()
(folder / "child").write_text(str(process.pid))
kept = tempfile.TemporaryDirectory(dir=folder, prefix="kept")
atexit.register((folder / "written").touch)
if sys.argv[2] == "waits":
    atexit.register(threading.Event().wait)
process_exit.exit_without_waiting()
"""


@pytest.mark.parametrize(("kind", "seconds"), [("ends", "600"), ("stays", "1"), ("waits", "1")])
def test_children_and_temporary_folders_end_with_the_process(
    kind: str, seconds: str, tmp_path: Path
) -> None:
    """In the order of ``atexit``; of what takes longer, the rest after a time limit."""
    assert python(LEFT, tmp_path, kind, seconds).returncode == 1
    child = int((tmp_path / "child").read_text())
    left = {path.name for path in tmp_path.iterdir()} - {"child"}
    assert left == {"written"} if kind == "ends" else left <= {"written"}
    assert ends(child)


REFUSED = """
import atexit, sys, threading
import torch.distributed as dist
from megatron_cg.consensus import process_exit
from megatron_cg.consensus.process_exit import clear_exit
process_exit.SECONDS = 0.5
from megatron_cg.errors import ReplayMismatchError
from megatron_cg.replay.mismatch_policy import Counters
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.mismatch_policy import MismatchPolicy, ReplayPolicy
ranks, caught, in_backward = (int(word) for word in sys.argv[1:])
# What waits for other ranks; a single rank has none.
atexit.register(threading.Event().wait if ranks > 1 and not caught else lambda: print("as usual"))
dist.is_initialized, dist.get_world_size = lambda: True, lambda: ranks
policy = MismatchPolicy(ReplayPolicy("error"), Counters())
mismatch = Mismatch("shape", "x", "1", "2", "Cause.")
try:
    if in_backward:
        policy.mismatched_in_backward(mismatch, "layer")
    policy.mismatched(mismatch, "layer", collectives=False)
except ReplayMismatchError:
    clear_exit()  # The error is under way: as when a with block of graphs ends.
    if not caught:
        raise
clear_exit()
"""


@pytest.mark.parametrize("in_backward", [0, 1])
@pytest.mark.parametrize(
    ("ranks", "caught", "code", "told"),
    [(2, 0, 1, ""), (2, 1, 0, "as usual"), (1, 0, 1, "as usual")],
)
def test_a_refused_replay_ends_the_process_at_once_unless_it_goes_on(
    ranks: int, caught: int, code: int, told: str, in_backward: int
) -> None:
    ended = python(REFUSED, ranks, caught, in_backward)
    assert (ended.returncode, ended.stdout.strip()) == (code, told)
    assert bool(caught) is not ("ReplayMismatchError" in ended.stderr)


def failed_votes() -> list[int]:
    """In one process: whether it leaves after each vote that fails."""
    left: list[int] = []
    vars(exchange)["exit_without_waiting"] = lambda: left.append(1)
    rank, counts = dist.get_rank(), []
    votes, late = Agreement(), Agreement()
    with pytest.raises(AgreementError):
        votes.agree(Kind.DELETION, Vote(), serial=rank)
    counts.append(len(left))
    with pytest.raises(AgreementError):
        late.on_any_rank(f"layer {rank % 2}")
    counts.append(len(left))
    return counts


def test_a_process_leaves_after_a_failed_vote() -> None:
    assert on_ranks(failed_votes, 3) == [[1, 2]] * 3
