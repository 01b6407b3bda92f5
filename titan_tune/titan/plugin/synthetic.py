"""Synthetic tokens: no tokenizer, no download, the same global batch whatever the layout.

A sample is a function of (seed, step, index in the global batch) alone, and the microbatches of all
data-parallel ranks partition the indices of a step. So every layout and every accumulation split of
one global batch trains on the same tokens, and losses of different candidates can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import torch

MEAN_DOCUMENT_TOKENS: Final = 1000
"""How far apart end-of-document tokens are on average; flex and varlen masks split there."""


class SyntheticTokens:
    """torchtitan's dataloader protocol: yields ``({"input": ids}, labels)``, both (batch, seq_len) int64.

    Token ids follow Zipf's law (density 1/x over the vocabulary), so that a model's loss falls from
    ln V within tens of steps as it learns the frequencies. The label of a token is the next token.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        seq_len: int,
        local_batch_size: int,
        global_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        seed: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.local_batch_size = local_batch_size
        self.microbatch_stride = local_batch_size * dp_world_size
        # a global batch that does not divide is refused by torchtitan, after the loader was built
        self.microbatches_per_step = max(1, global_batch_size // self.microbatch_stride)
        self.first_index = dp_rank * local_batch_size
        self.seed = seed
        self.microbatches_read = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            step, microbatch = divmod(self.microbatches_read, self.microbatches_per_step)
            first = microbatch * self.microbatch_stride + self.first_index
            tokens = torch.stack(
                [self.sample(step, index) for index in range(first, first + self.local_batch_size)]
            )
            self.microbatches_read += 1
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def sample(self, step: int, index: int) -> torch.Tensor:
        """Tokens of sample ``index`` of the global batch of ``step``: (seq_len + 1,) int64."""
        generator = torch.Generator().manual_seed(_mix(self.seed, step, index))
        uniform = torch.rand(self.seq_len + 1, generator=generator, dtype=torch.float64)
        # V^u - 1 has density 1/((x + 1) ln V) on [0, V - 1): the inverse distribution, with no table
        ids = torch.expm1(uniform * math.log(self.vocab_size)).to(torch.int64)
        return ids.clamp_(max=self.vocab_size - 1)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands."""
        return {"microbatches_read": self.microbatches_read}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict()``."""
        self.microbatches_read = state_dict["microbatches_read"]


class StubTokenizer:
    """What attention masks ask of a tokenizer: ``eos_id``."""

    def __init__(self, vocab_size: int) -> None:
        # the id whose Zipf probability 1/(id ln V) makes documents of the mean length
        self.eos_id = min(vocab_size - 1, round(MEAN_DOCUMENT_TOKENS / math.log(vocab_size)))


def build_loader(*, vocab_size: int, dp_world_size: int, dp_rank: int, job_config: Any) -> SyntheticTokens:
    """The loader of one data-parallel rank, from torchtitan's job config."""
    training = job_config.training
    global_batch_size = training.global_batch_size
    if global_batch_size < 0:
        global_batch_size = training.local_batch_size * dp_world_size
    return SyntheticTokens(
        vocab_size=vocab_size,
        seq_len=training.seq_len,
        local_batch_size=training.local_batch_size,
        global_batch_size=global_batch_size,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        seed=job_config.debug.seed or 0,
    )


def _mix(*values: int) -> int:
    """SplitMix64 over the values, folded to the 32 bits that torch's CPU generator keeps of a seed."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 32
