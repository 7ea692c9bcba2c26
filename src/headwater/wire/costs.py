"""headwater.v1.PassCosts to and from headwater.costs."""

from __future__ import annotations

from headwater.costs import PassCosts
from headwater.v1 import costs_pb2 as pb


def pass_costs_to_pb(costs: PassCosts) -> pb.PassCosts:
    """The wire form."""
    return pb.PassCosts(
        seconds_per_pass=costs.seconds_per_pass,
        seconds_per_token=costs.seconds_per_token,
        measured_passes=costs.measured_passes,
        max_tokens_per_pass=costs.max_tokens_per_pass,
    )


def pass_costs_from_pb(message: pb.PassCosts) -> PassCosts:
    """An older engine tells nothing: then nothing is known."""
    return PassCosts(
        seconds_per_pass=message.seconds_per_pass,
        seconds_per_token=message.seconds_per_token,
        measured_passes=message.measured_passes,
        max_tokens_per_pass=max(1, message.max_tokens_per_pass),
    )
