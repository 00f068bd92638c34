"""A linear probe: what kind of token comes next, read from one state of the token before it."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch.nn import functional

KINDS = ("line break", "space", "word", "part of a word", "number", "mark")

_STEPS = 60
_DECAY = 1e-3


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """Share of held-out places whose next token's kind is foretold.

    Args:
        probe: from the state.
        by_token: from the token itself: the kind that follows it most often in the rows of training.
        majority: the most frequent kind, everywhere.
    """

    probe: float
    by_token: float
    majority: float


def kind(text: str) -> int:
    """Place in KINDS of a token's text."""
    word = text.strip()
    if not word:
        return KINDS.index("line break" if "\n" in text else "space")
    if word.isalpha():
        return KINDS.index("word" if text[0].isspace() else "part of a word")
    return KINDS.index("number" if word.isdigit() else "mark")


def probe(
    ids: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
    kinds: torch.Tensor,
    train: Sequence[int],
    held_out: Sequence[int],
) -> ProbeResult:
    """Fit by logistic regression on some rows, and try it on others.

    Args:
        ids: i64 [n] of each row.
        states: bf16 [n, H] of each row, each state of one size.
        kinds: i64 [V], place in KINDS of every token.
        train, held_out: rows.
    """
    x, y = _places(ids, states, kinds, train)
    mean, scale = x.mean(dim=0), x.std(dim=0).clamp_min(1e-3)
    weight = torch.zeros(len(KINDS), x.shape[1] + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def scores(x: torch.Tensor) -> torch.Tensor:
        return functional.linear((x - mean) / scale, weight[:, 1:], weight[:, 0])

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = functional.cross_entropy(scores(x), y) + _DECAY * weight.square().sum()
        found.backward()
        return found

    optimizer.step(loss)
    held_x, held_y = _places(ids, states, kinds, held_out)
    majority = int(torch.bincount(y).argmax())
    after = defaultdict[int, Counter[int]](Counter)
    for token, following in zip(_tokens(ids, train), y.tolist(), strict=True):
        after[token][following] += 1
    by_token = [after[token].most_common(1)[0][0] if token in after else majority for token in _tokens(ids, held_out)]
    with torch.inference_mode():
        found = scores(held_x).argmax(dim=1)
    return ProbeResult(
        probe=float((found == held_y).float().mean()),
        by_token=float((torch.tensor(by_token) == held_y).float().mean()),
        majority=float((held_y == majority).float().mean()),
    )


def _places(
    ids: Sequence[torch.Tensor], states: Sequence[torch.Tensor], kinds: torch.Tensor, rows: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([states[i][:-1] for i in rows]).float(), torch.cat([kinds[ids[i][1:]] for i in rows])


def _tokens(ids: Sequence[torch.Tensor], rows: Sequence[int]) -> list[int]:
    return [token for i in rows for token in ids[i][:-1].tolist()]
