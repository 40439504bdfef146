"""Which deployments the `prefix_affinity` strategy compares for a prompt: all of a few, or the likely best of many.

These are the ones that computed most of the prompt before (`gateway/prefix/holders.py`), and some that would begin with
it soonest.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from gateway.deployments.state import DeploymentState
from gateway.prefix.estimate import Estimate

COMPARED_MAX = 12  # deployments that are all compared
SHORTLIST = 4  # of more deployments, these are compared, and those that hold the prefix
_ESTIMATE = attrgetter("estimate")
_BY_STANDING = attrgetter("estimate.standing_seconds")


def shortlist(
    chain: Sequence[int], deployments: Sequence[DeploymentState], estimates: tuple[Estimate, ...], home: Estimate | None
) -> tuple[Sequence[DeploymentState], Sequence[DeploymentState]]:
    """The deployments whose costs are compared, of many those that hold the prompt or begin soonest, and the others."""
    if len(deployments) <= COMPARED_MAX:
        return deployments, ()
    by_standing = sorted(deployments, key=_BY_STANDING)
    compared, others = by_standing[:SHORTLIST], by_standing[SHORTLIST:]
    holders = {*estimates[0].traffic.holders.find(chain), home}.difference(map(_ESTIMATE, compared))
    # There are at most a few. Those that do not serve this call are not among the estimates.
    places = sorted([others.index(deployments[estimates.index(one)]) for one in holders if one in estimates])
    compared += [others[place] for place in places]
    for place in reversed(places):
        del others[place]
    return compared, others
