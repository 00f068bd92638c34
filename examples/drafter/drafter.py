"""A small drafter in the manner of EAGLE-3: one decoder layer over three states of the target and its next token."""

import math
from collections.abc import Sequence

import torch
from data import Example, unit
from torch import nn
from torch.nn import functional

BATCH = 4
_HEAD_DIM = 64
_WARMUP = 20


class Drafter(nn.Module):
    """Embedding and LM head are the target's, and stay as they are.

    Args:
        embed_tokens: [V, H], the target's.
        head: [D, H], the rows of its LM head in the draft's vocabulary.
        heads: attention heads.
    """

    embed: torch.Tensor
    head: torch.Tensor

    def __init__(self, embed_tokens: torch.Tensor, head: torch.Tensor, heads: int = 6) -> None:
        super().__init__()
        hidden = head.shape[1]
        self.register_buffer("embed", unit(embed_tokens))
        self.register_buffer("head", head.bfloat16())
        self.heads = heads
        self.fuse = nn.Linear(3 * hidden, hidden, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=1e-5) for _ in range(3))
        self.qkv = nn.Linear(2 * hidden, 3 * heads * _HEAD_DIM, bias=False)
        self.out = nn.Linear(heads * _HEAD_DIM, hidden, bias=False)
        self.up = nn.Linear(hidden, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, hidden, bias=False)
        for last in (self.out, self.down):
            nn.init.zeros_(last.weight)

    def forward(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Logits over the draft's vocabulary.

        Args:
            states: bf16 [B, T, 3, H].
            tokens: i64 [B, T].

        Returns:
            [B, T, D].
        """
        batch, length = tokens.shape
        x = self.fuse(states.flatten(2))
        mixed = torch.cat([self.embed[tokens], self.norms[0](x.float())], dim=-1)
        q, k, v = (part.transpose(1, 2) for part in self.qkv(mixed).view(batch, length, -1, _HEAD_DIM).chunk(3, dim=2))
        seen = functional.scaled_dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x.float())).chunk(2, dim=-1)
        x = x + self.down(functional.silu(gate) * up)
        return self.norms[2](x.float()) @ self.head.T


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of [B, heads, T, 64]."""
    half = _HEAD_DIM // 2
    angle = torch.arange(x.shape[2])[:, None] * torch.pow(10000.0, -torch.arange(half) / half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def train(
    rows: Sequence[Example], embed_tokens: torch.Tensor, head: torch.Tensor, seed: int, epochs: int, rate: float = 2e-3
) -> Drafter:
    """Train a drafter to give the target's distribution. A seed decides its start and the order of the rows."""
    torch.manual_seed(seed)
    drafter = Drafter(embed_tokens, head)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    batches = [b for _ in range(epochs) for b in torch.randperm(len(rows)).split(BATCH)]
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / _WARMUP) * (1 + math.cos(math.pi * step / len(batches))) / 2
        states, tokens, counts, target = _padded([rows[i] for i in batch.tolist()])
        with torch.autocast("cpu", torch.bfloat16):
            found = drafter(states, tokens)
        loss = -(target.float() * found.float().log_softmax(dim=-1)).sum(dim=-1)[counts].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()


@torch.inference_mode()
def agreement(drafter: Drafter, rows: Sequence[Example], own: Sequence[torch.Tensor], d2t: torch.Tensor) -> float:
    """Share of supervised places where the drafter's most likely token is the target's own.

    Args:
        drafter: trained.
        rows: held out; their targets are not looked at.
        own: for each row the target's own token at t + 2, i64 [n - 1].
        d2t: i64 [D], see readers.vocab.vocab_maps.
    """
    ids = torch.arange(len(d2t)) + d2t
    hits = places = 0
    for row, wanted in zip(rows, own, strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            found = ids[drafter(row.states[None], row.tokens[None])[0].argmax(dim=-1)]
        hits += int((found == wanted)[row.counts].sum())
        places += int(row.counts.sum())
    return hits / places


def _padded(rows: Sequence[Example]) -> tuple[torch.Tensor, ...]:
    """States, tokens, counts and targets of several rows; what pads them comes last and does not count."""
    return tuple(
        nn.utils.rnn.pad_sequence([getattr(row, name) for row in rows], batch_first=True)
        for name in ("states", "tokens", "counts", "target")
    )
