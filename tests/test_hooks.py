"""The hooks without SGLang: whatever a pass ends with, its rows are published, and nothing of ours raises."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import arenas
import numpy as np
import pytest
import torch
from arenas import HIDDEN, STATES, Live

from ray_extract.capture import compat
from ray_extract.capture.arena import Arena
from ray_extract.capture.copier import CpuCopier
from ray_extract.capture.hooks import Hooks
from ray_extract.capture.writer import Fault, Writer
from ray_extract.errors import CaptureRefused

LENGTHS = [5, 3]


class Case:
    """A writer behind hooks, and an image of two rows."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.hooks = Hooks(arena.folder)
        self.hooks._writer = Writer(self.hooks._arena, 0, CpuCopier(self.hooks._arena))
        self.live: Live = arenas.open_image(arena, LENGTHS)
        self.rids = [self.live.rid(arena.spec.nonce, row) for row in range(2)]
        self.batch = SimpleNamespace(
            forward_mode=SimpleNamespace(name="EXTEND"),
            rids=self.rids,
            extend_prefix_lens_cpu=[0, 0],
            extend_seq_lens_cpu=LENGTHS,
        )

    def forward(self, ends: Any) -> Any:
        """A pass whose model hands over its states and then does `ends`."""
        return self.hooks.around_forward(
            lambda runner, batch: (self.logits(), ends())[1], SimpleNamespace(is_draft_worker=False), self.batch
        )

    def logits(self) -> None:
        ids = torch.from_numpy(self.live.table.input_ids.copy())
        states = [torch.ones(sum(LENGTHS), HIDDEN) for _ in range(STATES)]
        self.hooks.around_logits(lambda *args: None, None, ids, states[-1], None, None, states[:-1])

    def marks(self) -> tuple[list[int], list[int], bool]:
        """Faults and covered tokens of the rows, and whether anything is pinned."""
        control, slot = self.arena.control, self.live.extent.slot
        return control.fault[slot, :2].tolist(), control.covered[slot, :2].tolist(), bool(control.busy.any())


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    arena = arenas.make_arena(tmp_path)
    yield Case(arena)
    arena.close()


def test_a_pass_is_published_before_its_result_is_processed(case: Case) -> None:
    output = case.forward(lambda: SimpleNamespace(logits_output=SimpleNamespace()))
    assert case.marks() == ([0, 0], [0, 0], True)
    case.hooks.before_process_batch_result(None, None, output)
    assert case.marks() == ([0, 0], LENGTHS, False)


class Closed:
    """Takes no attribute."""

    __slots__ = ()


@pytest.mark.parametrize("carrier", [None, Closed()], ids=["no output", "an output that takes no attribute"])
def test_a_pass_whose_result_cannot_carry_the_ticket_is_published_at_once(case: Case, carrier: Any) -> None:
    case.forward(lambda: SimpleNamespace(logits_output=carrier))
    assert case.marks() == ([0, 0], LENGTHS, False)


def test_a_model_that_raises_is_not_kept_from_it_and_pins_nothing(case: Case) -> None:
    def ends() -> None:
        raise ValueError("the model's own")

    with pytest.raises(ValueError, match="the model's own"):
        case.forward(ends)
    assert case.marks()[2] is False


def test_a_model_that_skips_its_logits_processor_fails_the_rows(case: Case) -> None:
    output = case.hooks.around_forward(
        lambda runner, batch: SimpleNamespace(logits_output=None), SimpleNamespace(is_draft_worker=False), case.batch
    )
    assert output.logits_output is None
    assert case.marks() == ([Fault.NO_STATES] * 2, [0, 0], False)


def test_requests_that_cannot_be_checked_fail_and_the_others_do_not(case: Case) -> None:
    ids = [case.live.ids(row).tolist() for row in range(2)]
    requests = [SimpleNamespace(rid=case.rids[0]), SimpleNamespace(rid=case.rids[1], origin_input_ids=ids[1])]
    case.hooks.after_init_new(None, None, SimpleNamespace(reqs=requests))
    output = case.forward(lambda: SimpleNamespace(logits_output=SimpleNamespace()))
    case.hooks.before_process_batch_result(None, None, output)
    assert case.marks() == ([Fault.HOOK_FAILED, 0], [0, LENGTHS[1]], False)


def test_a_batch_that_cannot_be_read_runs_and_its_rows_fail(case: Case) -> None:
    case.batch.extend_prefix_lens_cpu = ["not a number", 0]
    output = case.forward(lambda: SimpleNamespace(logits_output=SimpleNamespace()))
    case.hooks.before_process_batch_result(None, None, output)
    assert case.marks() == ([Fault.HOOK_FAILED] * 2, [0, 0], False)


def test_states_are_taken_once_in_a_pass(case: Case) -> None:
    """A second call of the logits processor in one pass is not of the model's prompt."""
    issued: list[Any] = []
    assert case.hooks._writer is not None
    real = case.hooks._writer.issue

    def issue(*args: Any) -> None:
        issued.append(args)
        real(*args)

    case.hooks._writer.issue = issue  # type: ignore[method-assign]
    output = case.forward(lambda: (case.logits(), SimpleNamespace(logits_output=SimpleNamespace()))[1])
    case.hooks.before_process_batch_result(None, None, output)
    assert len(issued) == 1 and case.marks() == ([0, 0], LENGTHS, False)
    raw = case.live.layout.state_bytes(case.live.extent.buffer, case.live.layout.columns[0])
    assert (raw.view(np.float32) == 1).all()


@pytest.mark.parametrize("fused", [True, False])
def test_what_the_final_norm_reads_goes_before_what_it_gives(case: Case, fused: bool) -> None:
    seen: list[list[torch.Tensor]] = []
    case.hooks._writer.issue = lambda work, ids, states: seen.append(states)  # type: ignore[method-assign, union-attr]
    given, read, aux = (torch.full((sum(LENGTHS), HIDDEN), float(i)) for i in range(3))

    def forward(runner: Any, batch: Any) -> Any:
        # SGLang's fused norm leaves the sum of both in its second argument; alone, it reads its only one.
        output, args = ((given, read), (given, read)) if fused else (given, (read,))
        case.hooks.after_final_norm(None, args, output)
        case.hooks.around_logits(lambda *a: None, None, torch.zeros(8), given, None, None, [aux])
        return SimpleNamespace(logits_output=SimpleNamespace())

    for _ in range(2):
        case.hooks.around_forward(forward, SimpleNamespace(is_draft_worker=False), case.batch)
    assert [[float(s[0, 0]) for s in states] for states in seen] == [[2.0, 1.0, 0.0]]


def test_a_norm_outside_of_a_pass_of_ours_leaves_nothing(case: Case) -> None:
    case.hooks.after_final_norm(None, (torch.ones(1, HIDDEN),), torch.ones(1, HIDDEN))
    assert case.hooks._prenorm is None


# While the model is loaded


class Layered(torch.nn.Module):
    """A model whose setter does as it is told."""

    layers_to_capture: tuple[int, ...] = ()

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.layers_to_capture = tuple(i + 1 for i in ids)


@pytest.mark.parametrize("layers", [8, 2])
def test_a_model_that_hands_over_something_else_is_refused_for_the_boundaries_that_it_would(
    case: Case, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    """Boundary N, here 2 of 2 layers, comes from the final norm and not from the model's own capture."""
    monkeypatch.setattr(compat, "logits_processor_overridden", lambda model: None)
    monkeypatch.setattr(compat, "miscaptured", lambda model: "Gemma3TextModel")
    case.hooks._arena.spec = dataclasses.replace(case.hooks._arena.spec, boundaries=(2,))
    model = Layered()
    model.embed_tokens = model.layers = model.norm = torch.nn.Identity()
    config = SimpleNamespace(hidden_size=HIDDEN, num_hidden_layers=layers)
    runner = SimpleNamespace(dtype=torch.float32, model_config=config, model=model)
    if layers == 2:
        assert case.hooks._configure(runner) == (2,)
        return
    with pytest.raises(CaptureRefused, match=r"Layered: in this SGLang its Gemma3TextModel .* boundaries \[2\]"):
        case.hooks._configure(runner)
    monkeypatch.setattr(compat, "miscaptured", lambda model: None)
    assert case.hooks._configure(runner) == (2,)
