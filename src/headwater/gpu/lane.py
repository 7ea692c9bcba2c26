"""A lane: memory through which one micro-batch on a GPU asks the CPU for its experts.

Owns its layout; what is written there, and when, is mailbox.py's.
"""

from __future__ import annotations

import torch

from headwater.gpu.ring import aligned

# Tokens of a micro-batch up to which experts are predicted. With more the CPU computes for so long
# that there is little to gain from what it reads ahead.
MOST_PREDICTED = 4


class Lane:
    """Memory that both sides see, for up to `max_tokens` at a time.

    `x` and `output` are FP32 [tokens, hidden], `experts` INT32 and `weights` FP32 [tokens, k];
    `posted` and `done` are tickets, INT64 [1]. `predicted` is the ticket that will probably ask for
    `predictions`, INT32 [tokens, k], the likeliest first. On the device, `count` numbers the
    tickets; `arrivals` counts the tokens that have chosen, then programs that have scored each
    token.
    """

    def __init__(
        self, max_tokens: int, hidden_size: int, num_choices: int, device: torch.device
    ) -> None:
        ticket, states, choices = 64, 4 * max_tokens * hidden_size, 4 * max_tokens * num_choices
        sizes = [*3 * [ticket], *2 * [states], *3 * [choices]]
        memory = torch.zeros(
            sum(map(aligned, sizes)), dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        parts = memory.split([aligned(size) for size in sizes])
        self.max_tokens = max_tokens
        self.posted, self.done, self.predicted = (part.view(torch.int64)[:1] for part in parts[:3])
        self.x, self.output = (
            part[:states].view(torch.float32).view(max_tokens, hidden_size) for part in parts[3:5]
        )
        self.experts, self.predictions, weights = (
            part[:choices].view(torch.int32).view(max_tokens, num_choices) for part in parts[5:]
        )
        self.weights = weights.view(torch.float32)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        self.arrivals = torch.zeros(1 + max_tokens, dtype=torch.int32, device=device)

    @property
    def addresses(self) -> tuple[int, int, int, int, int, int, int, int]:
        """Where its parts are, as the worker wants them."""
        asked = (self.posted, self.done, self.x, self.experts, self.weights, self.output)
        parts = (*asked, self.predicted, self.predictions)
        return tuple(part.data_ptr() for part in parts)
