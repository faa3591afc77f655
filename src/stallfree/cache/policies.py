"""Eviction policies. A policy is a score per id and an admission rule.

| policy | score | admission when full | source |
| --- | --- | --- | --- |
| minio | none | never | Mohan et al., "Analyzing and Mitigating Data Stalls", VLDB 2021, section 4.1 |
| fifo / lru / lfu | time of entry / time of last use / number of uses | always | |
| random | the score of the last evicted record, plus an exponential draw at entry | always | |
| importance | given by the user | above the lowest resident | Chen et al., "iCACHE", HPCA 2023 |
| oracle | minus the next use, given | above the lowest resident | Belady, IBM Systems Journal 5 (2), 1966 |

The resident with the lowest score is evicted; of equal scores, the one with the lowest id. `Victims` selects many
victims by one scan of all scores, so that the cost of an eviction does not depend on the number of residents.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from stallfree.errors import InputError

Array = np.ndarray[Any, np.dtype[Any]]


class Policy:
    """Never evicts: residents stay (`minio`). The base class of the others."""

    name = "minio"
    scored = False
    """Whether the policy keeps a score per id."""
    evicts = False
    """Whether it evicts for a new record when the cache is full."""
    given = False
    """Whether the caller sets the scores, and a new record must be above the residents that it replaces."""

    def entered(self, score: Array, ids: Array, tick: int, level: float) -> None:
        """Update the scores of `ids` after they became resident.

        `tick` is the number of uses so far, `level` the score of the last evicted record.
        """

    def used(self, score: Array, ids: Array, tick: int) -> None:
        """Update the scores of `ids` after hits."""


class Fifo(Policy):
    """Evicts the oldest record."""

    name, scored, evicts = "fifo", True, True

    def entered(self, score: Array, ids: Array, tick: int, level: float) -> None:
        score[ids] = np.arange(tick, tick + len(ids))


class Lru(Fifo):
    """Evicts the least recently used record."""

    name = "lru"

    def used(self, score: Array, ids: Array, tick: int) -> None:
        score[ids] = np.arange(tick, tick + len(ids))


class Lfu(Policy):
    """Evicts the record with the fewest uses since its admission, which counts as one use."""

    name, scored, evicts = "lfu", True, True

    def entered(self, score: Array, ids: Array, tick: int, level: float) -> None:
        score[ids] = 1

    def used(self, score: Array, ids: Array, tick: int) -> None:
        each, times = np.unique(ids, return_counts=True)
        score[each] += times


class Random(Policy):
    """Evicts any resident, each with the same probability.

    A score is an expiry time: `level`, the current time, plus an exponentially distributed lifetime. The exponential
    distribution is memoryless: the remaining lifetime of an old record has the same distribution as that of a new one.
    So all residents are equally likely to be next, and no score needs to be drawn again.
    """

    name, scored, evicts = "random", True, True

    def entered(self, score: Array, ids: Array, tick: int, level: float) -> None:
        numbers = mixed(np.arange(tick + 1, tick + 1 + len(ids), dtype=np.uint64))  # one per tick
        score[ids] = level - np.log1p(-((numbers >> np.uint64(11)) * 2.0**-53))  # of a uniform one in [0, 1)


class Importance(Policy):
    """Evicts the record of lowest importance for a more important one.

    The user sets the importance of each id.
    """

    name, scored, evicts, given = "importance", True, True, True


class Oracle(Importance):
    """Evicts the record that is needed last for one that is needed sooner, which maximizes the hits.

    The scores are minus the next uses (`next_uses`), which the caller computes from the plan.
    """

    name = "oracle"


POLICIES: dict[str, Callable[[], Policy]] = {
    kind.name: kind for kind in (Policy, Fifo, Lru, Lfu, Random, Importance, Oracle)
}


def make_policy(policy: str | Policy) -> Policy:
    """The policy of this name. Raises `InputError` for an unknown one."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        raise InputError(f"policy={policy!r} is unknown: use one of {', '.join(sorted(POLICIES))}")
    return POLICIES[policy]()


def next_uses(epochs: list[Array], num_ids: int) -> list[Array]:
    """For each access of a plan, the time of the next access to the same id, or infinity.

    Args:
        epochs: ids in the order of their use, epoch after epoch.
        num_ids: number of samples.

    Accesses are numbered from 0 over all epochs. The scores of the policy "oracle" are minus these numbers.
    """
    following = np.full(num_ids, np.inf)
    end = sum(len(ids) for ids in epochs)
    found = []
    for ids in reversed(epochs):
        uses = following[ids]
        times = np.arange(end - len(ids), end)
        following[ids[::-1]] = times[::-1]
        if (following[ids] != times).any():  # this epoch uses some ids again
            order = np.argsort(ids, kind="stable")
            again = np.flatnonzero(ids[order[1:]] == ids[order[:-1]])
            uses[order[again]] = times[order[again + 1]]
        end -= len(ids)
        found.append(uses)
    return found[::-1]


def mixed(numbers: Array, seed: int = 0) -> Array:
    """A hash of each number (uint64) with the seed: the finaliser of SplitMix64, which mixes all bits."""
    mixed = numbers * np.uint64(0x9E37_79B9_7F4A_7C15) + np.uint64(seed)
    for shift, factor in ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


class Victims:
    """A queue of residents in ascending order of (score, id), which finds the lowest cheaply.

    An entry is the complex number score + id * i, because NumPy orders complex numbers by the real part and then by the
    imaginary one. The queue holds every resident that is not above `victims_limit`. It may also hold stale entries: an
    entry is valid only if its id is resident and still has this score. Of equal entries, one counts. A resident whose
    score has risen is reinserted when it reaches the front. A new record, or a resident whose score has fallen, is
    inserted immediately. An empty queue is refilled. So each choice equals that of sorting all residents again.

    `state` has the arrays `victims`, `victims_limit` and `first` (of an `Index`), and `span` is a pair of integers
    (position, end): they may be in shared memory. All calls are made under the writer lock.
    """

    def __init__(self, state: Any, span: Array) -> None:
        self._state = state
        self._span = span
        self._taken_at = np.empty(0, np.int64)

    def clear(self) -> None:
        """Empty the queue."""
        self._span[:] = 0

    def entered(self, score: Array, ids: Array) -> None:
        """Insert resident `ids` whose scores may have fallen below the limit."""
        if self._span[0] < self._span[1]:
            self._insert(_keys(score[ids], ids))

    def choose(self, count: int, score: Array) -> Array:
        """Up to `count` residents of lowest score, in ascending order; fewer only if no more are resident.

        The caller must drop them before the next call, or return them with `give_back`.
        """
        chosen: list[Array] = []
        while count > 0:
            if self._span[0] >= self._span[1] and not self._fill(score, chosen):
                break
            taken = self._take(count, score, chosen)
            if len(taken):
                chosen.append(taken)
                count -= len(taken)
        return chosen[0] if len(chosen) == 1 else np.concatenate([np.empty(0, np.int64), *chosen])

    def give_back(self, score: Array, ids: Array) -> None:
        """Return `ids`, the last of those just chosen, to the queue."""
        if len(ids) <= len(self._taken_at):
            self._span[0] = self._taken_at[-len(ids)]
        else:
            self.entered(score, ids)

    def _take(self, count: int, score: Array, chosen: list[Array]) -> Array:
        """Some of the next victims, none if the queue had to be sorted first; `chosen` were taken before."""
        state = self._state
        at, end = (int(n) for n in self._span)
        stop = min(at + count + count // 2 + 8, end)
        keys: Array = state.victims[at:stop]
        ids = keys.imag.astype(np.int64)
        now = score[ids]
        there = state.first[ids] != 0
        if chosen:  # the chosen ids are still resident, and stale entries of them may follow
            there &= ~np.isin(ids, np.concatenate(chosen))
        good = there & (now == keys.real)
        moved = there > good
        if moved.any():
            put = _keys(now[moved], ids[moved])
            put = put[put <= state.victims_limit]
            if len(put):
                keys = keys[good]
                state.victims[stop - len(keys) : stop] = keys
                self._span[0] = stop - len(keys)
                self._insert(put)
                return np.empty(0, np.int64)
        good[1:] &= keys[1:] != keys[:-1]
        picked = np.flatnonzero(good)[:count]
        self._taken_at = at + picked
        self._span[0] = self._taken_at[-1] + 1 if len(picked) == count else stop
        return ids[picked]

    def _insert(self, keys: Array) -> None:
        state = self._state
        keys = keys[keys <= state.victims_limit]
        if len(keys) == 0:
            return
        room = len(state.victims)
        if len(keys) > room // 2:
            self.clear()
            return
        keys.sort()
        queue: Array = state.victims[self._span[0] : self._span[1]]
        queue = np.insert(queue, np.searchsorted(queue, keys), keys)
        if len(queue) > room:
            queue = queue[:room]
            state.victims_limit[:] = queue[-1]
        state.victims[: len(queue)] = queue
        self._span[:] = 0, len(queue)

    def _fill(self, score: Array, chosen: list[Array]) -> bool:
        """Queue the lowest of all residents, with spare space for insertions. Returns False without residents."""
        state = self._state
        there = state.first != 0
        for gone in chosen:
            there[gone] = False
        ids = np.flatnonzero(there)
        if len(ids) == 0:
            return False
        scores, room = score[ids], len(state.victims)
        if len(ids) > room * 3 // 4:
            low = scores <= np.partition(scores, room * 3 // 4)[room * 3 // 4]
            ids, scores = ids[low], scores[low]
        order = np.argsort(scores, kind="stable")[:room]  # ties in the order of ids
        state.victims[: len(order)] = _keys(scores[order], ids[order])
        state.victims_limit[:] = state.victims[len(order) - 1]
        self._span[:] = 0, len(order)
        return True


def _keys(scores: Array, ids: Array) -> Array:
    keys = np.empty(len(ids), np.complex128)
    keys.real, keys.imag = scores, ids
    return keys
