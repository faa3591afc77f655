"""Which record goes when the cache is full. A policy is a score per id and a rule of admission.

| policy | score | admission when full | source |
| --- | --- | --- | --- |
| minio | none | never | Mohan et al., "Analyzing and Mitigating Data Stalls", VLDB 2021, section 4.1 |
| fifo / lru / lfu | time of entry / time of last use / number of uses | always | |
| random | drawn when victims are looked for | always | |

The resident of lowest score goes; of several, the one of lowest id. Victims are found many at a time (`Victims`), by
one partition of the scores of all residents, so that an eviction costs the same however many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stallfree.errors import InputError

Array = npt.NDArray[Any]


class Policy:
    """Never evicts: what is resident stays (`minio`). The base of the others."""

    name = "minio"
    scored = False
    """Whether the policy keeps a score per id."""
    evicts = False
    """Whether it makes room for a newcomer when the cache is full."""

    def entered(self, score: Array, ids: Array, tick: int) -> None:
        """`ids` have just become resident; `tick` is the number of uses before."""

    def used(self, score: Array, ids: Array, tick: int) -> None:
        """`ids` were hit."""

    def before_choice(self, score: Array, residents: Array, tick: int) -> None:
        """Victims are about to be chosen among `residents`."""


class Fifo(Policy):
    """The oldest goes."""

    name, scored, evicts = "fifo", True, True

    def entered(self, score: Array, ids: Array, tick: int) -> None:
        score[ids] = np.arange(tick, tick + len(ids))


class Lru(Fifo):
    """The one not used for longest goes."""

    name = "lru"

    def used(self, score: Array, ids: Array, tick: int) -> None:
        score[ids] = np.arange(tick, tick + len(ids))


class Lfu(Policy):
    """The one used least often since it came goes; the newcomer itself counts as one use."""

    name, scored, evicts = "lfu", True, True

    def entered(self, score: Array, ids: Array, tick: int) -> None:
        score[ids] = 1

    def used(self, score: Array, ids: Array, tick: int) -> None:
        np.add.at(score, ids, 1)


class Random(Policy):
    """Any resident goes, each with the same probability."""

    name, scored, evicts = "random", True, True

    def entered(self, score: Array, ids: Array, tick: int) -> None:
        score[ids] = 2.0  # above all that are drawn: not before the next choice

    def before_choice(self, score: Array, residents: Array, tick: int) -> None:
        score[residents] = np.random.default_rng(tick).random(len(residents))


POLICIES: dict[str, Callable[[], Policy]] = {"minio": Policy, "fifo": Fifo, "lru": Lru, "lfu": Lfu, "random": Random}


def make_policy(policy: str | Policy) -> Policy:
    """The policy of that name. Raises `InputError` for an unknown one."""
    if isinstance(policy, Policy):
        return policy
    if policy not in POLICIES:
        raise InputError(f"policy={policy!r} is unknown: use one of {', '.join(sorted(POLICIES))}")
    return POLICIES[policy]()


class VictimState(Protocol):
    """The arrays that `Victims` works on; in a live cache they lie in shared memory."""

    victim_ids: Array
    victim_scores: Array
    victims_limit: Array
    first: Array


class Victims:
    """A queue of residents in order of rising (score, id); the cheapest way to the lowest of all.

    The queue holds those residents that are not above `limit`, a pair (score, id), in that order. A resident whose
    score has risen since is put where it belongs, or dropped when it rose above the limit; a newcomer not above the
    limit is put in. When the queue is empty it is filled again. So each choice is the one that sorting all residents
    anew would give.

    `span` is a pair of integers (position, end) that may lie in shared memory. All calls are made under the lock of
    writers. A `share`-th of the residents is queued at a time, if there is room for so many.
    """

    def __init__(self, policy: Policy, state: VictimState, span: Array, share: int = 64) -> None:
        self.policy = policy
        self._share = share
        self._state = state
        self._span = span

    def forget(self) -> None:
        """Empty the queue."""
        self._span[:] = 0

    def entered(self, score: Array, ids: Array) -> None:
        """`ids` have become resident, perhaps with scores below the limit, or were chosen and are to stay after all."""
        if self._span[0] < self._span[1]:
            scores = score[ids]
            low = self._within(ids, scores)
            if low.any():
                self._insert(ids[low], scores[low])

    def choose(self, count: int, score: Array, tick: int) -> Array:
        """Up to `count` residents of lowest score, lowest first; fewer only when no more are resident.

        The caller must make them absent before the next call, or give them back with `entered`.
        """
        chosen: list[Array] = []
        while count > 0:
            if self._span[0] >= self._span[1] and not self._fill(score, tick, chosen):
                break
            taken = self._take(count, score)
            chosen.append(taken)
            count -= len(taken)
        none: Array = np.empty(0, np.uint32)
        return np.concatenate([none, *chosen])

    def _within(self, ids: Array, scores: Array) -> Array:
        limit, last = self._state.victims_limit
        within: Array = (scores < limit) | ((scores == limit) & (ids <= last))
        return within

    def _take(self, count: int, score: Array) -> Array:
        state = self._state
        at, end = self._span
        stop = min(at + count, end)
        ids: Array = state.victim_ids[at:stop].copy()
        known = state.victim_scores[at:stop]
        now = score[ids]
        alive = state.first[ids] != 0
        self._span[0] = stop
        if alive.all() and (now == known).all():
            return ids
        keep = alive & self._within(ids, now)
        ids, now = ids[keep], now[keep]
        order = np.lexsort((ids, now))
        ids, now = ids[order], now[order]
        if stop < end:
            score_after, id_after = state.victim_scores[stop], state.victim_ids[stop]
            surely = (now < score_after) | ((now == score_after) & (ids < id_after))
            if not surely.all():
                self._insert(ids[~surely], now[~surely])
                ids = ids[surely]
        return ids

    def _insert(self, ids: Array, scores: Array) -> None:
        state = self._state
        at, end = (int(n) for n in self._span)
        all_ids = np.concatenate((state.victim_ids[at:end], ids.astype(np.uint32)))
        all_scores = np.concatenate((state.victim_scores[at:end], scores))
        order = np.lexsort((all_ids, all_scores))
        room = len(state.victim_ids)
        if len(order) > room:
            order = order[:room]
            state.victims_limit[:] = all_scores[order[-1]], all_ids[order[-1]]
        state.victim_ids[: len(order)] = all_ids[order]
        state.victim_scores[: len(order)] = all_scores[order]
        self._span[:] = 0, len(order)

    def _fill(self, score: Array, tick: int, chosen: list[Array]) -> bool:
        state = self._state
        there = state.first != 0
        for gone in chosen:
            there[gone] = False
        residents = np.flatnonzero(there)
        if len(residents) == 0:
            return False
        self.policy.before_choice(score, residents, tick)
        scores = score[residents]
        size = min(max(16, len(residents) // self._share), len(state.victim_ids), len(residents))
        bound = np.partition(scores, size - 1)[size - 1]
        lowest = np.flatnonzero(scores < bound)
        same = np.flatnonzero(scores == bound)[: size - len(lowest)]  # residents are in order of ids
        lowest = np.concatenate((lowest[np.argsort(scores[lowest], kind="stable")], same))
        state.victim_ids[:size] = residents[lowest]
        state.victim_scores[:size] = scores[lowest]
        state.victims_limit[:] = bound, residents[lowest[-1]]
        self._span[:] = 0, size
        return True
