"""What befalls consumers of a shared loader who are late, slow, careful or killed: stallfree's and TensorSocket's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.harness import Check, Json, Options, Report, run_child, say, scratch_folder
from benchmarks.peers import venvs
from benchmarks.shared_probes import BATCHES, PATIENCE, SAMPLES, SLOW, SOME, STEP

NAME = "shared_faults"
QUESTION = (
    "Consumers that come late, are slow, keep their batches or are killed: what do they and the others get from "
    "`SharedLoader`, and what from TensorSocket?"
)
LIMIT = 60.0
TRIES, AT_THE_START = 3, 4
"""TensorSocket now and then stands still after its first messages: so often is a probe repeated when it does."""
STALL = 1.0
"""Seconds of standstill of the others when one is killed that still pass."""
OURS = "stallfree SharedLoader"
WHO: dict[str, tuple[str, str, Json]] = {
    OURS: ("", "benchmarks.contenders.shared_probes", {}),
    "TensorSocket": ("tensorsocket", "benchmarks.peers.tensorsocket_probes", {"packing": "own"}),
    "TensorSocket, by name through shared memory": (
        "tensorsocket",
        "benchmarks.peers.tensorsocket_probes",
        {"packing": "shared"},
    ),
}


@dataclass(frozen=True)
class Probe:
    """Something that happens to consumers.

    Attributes:
        name: of the program.
        what: happens, and what should follow.
        judge: whether the facts are as they should be.
        words: the facts in words.
        choice: whether it asks for something that only stallfree's has a name for.
        memory: whether it matters how batches are handed over.
    """

    name: str
    what: str
    judge: Callable[[Json], bool]
    words: Callable[[Json], str]
    choice: bool = False
    memory: bool = False

    def show(self, facts: Json) -> str:
        if "hung" in facts:
            return f"**fails**: hangs (ended after {facts['hung']:.0f} s)"
        words = f"`{facts['error'][:120]}`" if "error" in facts else self.words(facts)
        if facts.get("tries", 1) > 1:
            words += f" (try {facts['tries']}: before that it stood still from the start)"
        return f"{'passes' if self.passed(facts) else '**fails**'}: {words}"

    def passed(self, facts: Json) -> bool:
        return not {"hung", "error"} & facts.keys() and self.judge(facts)


def _whole(facts: Json) -> bool:
    """Whether a consumer had each sample of all its epochs once, unchanged."""
    wrong = [*facts["missing"], *facts["again"], facts["changed"], facts["spoilt"]]
    return bool(facts["ended"] and not any(wrong))


def _both(facts: Json) -> bool:
    return _whole(facts) and _whole(facts["other"])


def _had(facts: Json) -> str:
    """What a consumer had, in words."""
    words = []
    if facts["spoilt"]:
        words.append(f"{facts['spoilt']} of {facts['batches']} batches written over by the other")
    elif any(facts["missing"]):
        words.append(f"of {SAMPLES} samples {_numbers(facts['missing'])} missing per epoch")
    if any(facts["again"]):
        words.append(f"{_numbers(facts['again'])} more than once")
    if facts["changed"]:
        words.append(f"{facts['changed']} of {facts['batches']} batches changed while they were held")
    if not facts["ended"]:
        words.append(f"still waiting after {PATIENCE:.0f} s")
    return ", ".join(words) or "each sample once per epoch"


def _numbers(found: list[int]) -> str:
    return str(found[0]) if len(set(found)) == 1 else f"{min(found)} to {max(found)}"


def _two(one: str, other: str) -> Callable[[Json], str]:
    """What two consumers had, by their names."""
    return lambda facts: f"{one}: {_had(facts)}; {other}: {_had(facts['other'])}"


def _joined(facts: Json) -> str:
    asked, came = facts["had"]
    return (
        f"first batch after {facts['waited']:.2f} s, with sample {facts['first'][0]}, when the other had had {came} "
        f"batches ({asked} when asked); newcomer: {_had(facts)}; the other: {_had(facts['other'])}"
    )


def _lagged(facts: Json) -> str:
    seconds = facts["other"]["seconds"]
    took = f"{min(seconds):.1f} to {max(seconds):.1f} s per epoch" if seconds else "no epoch"
    return f"slow: {_had(facts)}; fast: {took}, {_had(facts['other'])}"


def _standing(facts: Json) -> str:
    who = [facts, facts["other"]] if "other" in facts else [facts]
    if not all(each["ended"] for each in who):
        return f"still waiting after {PATIENCE:.0f} s"
    return f"stand still for {max(each['standstill'] for each in who):.2f} s; {_had(facts)}"


def _went_on(facts: Json) -> bool:
    who = [facts, facts["other"]] if "other" in facts else [facts]
    return all(_whole(each) and each["standstill"] < STALL for each in who)


def _reach(facts: Json) -> str:
    if facts["ports"]:
        return f"{len(facts['ports'])} TCP ports, open to {', '.join(sorted(set(facts['ports'])))}"
    return f"no TCP port; Unix sockets of mode {', '.join(sorted(set(facts['modes'])))}"


PROBES = (
    Probe("tail", "One consumer, three epochs: each sample once, the last ones too.", _whole, _had),
    Probe(
        "join",
        f"A second consumer comes when the first has had {SOME} of {BATCHES} batches: both get all of their epochs.",
        _both,
        _joined,
    ),
    Probe(
        "laggard",
        f"One of two takes {SLOW * 1000:.0f} ms for a batch, the other {STEP * 1000:.0f}: each sample once for both.",
        _both,
        _lagged,
        memory=True,
    ),
    Probe(
        "keeper",
        "One of two keeps all batches of an epoch and compares them at its end with what they were.",
        _both,
        _two("keeper", "other"),
        memory=True,
    ),
    Probe(
        "writer",
        "One of two writes into its batches when it is done with them; the other, which is slower, does not see it.",
        _both,
        _two("reader", "writer"),
        memory=True,
    ),
    Probe("consumer_killed", "One of two is killed in mid-epoch: the other goes on.", _went_on, _standing),
    Probe(
        "producer_killed",
        "The process that prepares is killed in mid-epoch: the consumers go on.",
        _went_on,
        _standing,
    ),
    Probe(
        "listening",
        "Whom it listens to: this user alone.",
        lambda facts: not facts["ports"] and set(facts["modes"]) == {"600"},
        _reach,
    ),
)


def run(options: Options) -> Report:
    found: dict[str, dict[str, Json]] = {who: {} for who in WHO}
    versions: dict[str, str] = {}
    reason = venvs.why_missing("tensorsocket")
    with scratch_folder() as scratch:
        for probe in PROBES:
            for who, (venv, module, params) in WHO.items():
                beside = params.get("packing") == "shared" and not probe.memory
                if beside or (venv and (reason or probe.choice)):
                    continue
                task = {"probe": probe.name, "limit": LIMIT} | params
                python = {"python": venvs.python_of(venv)} if venv else {}
                for number in range(1, TRIES + 1 if venv else 2):
                    result = run_child(module, task, scratch=scratch, **python)
                    facts = result["facts"] | {"tries": number}
                    if facts.get("batches", 0 if "hung" in facts else BATCHES) > AT_THE_START:
                        break
                if venv and probe.name != "tail":
                    facts = _but_for_the_tail(facts, found["TensorSocket"]["tail"])
                found[who][probe.name] = facts
                versions |= result["versions"]
                say(f"  {probe.name}: {who}: {probe.show(facts)}")
    rows = [[probe.what, *(_cell(probe, facts, reason) for facts in found.values())] for probe in PROBES]
    share = sum(probe.passed(found[OURS][probe.name]) for probe in PROBES) / len(PROBES)
    return Report(
        columns=["what is probed", *WHO],
        rows=rows,
        checks=[Check(f"{OURS}: share of {len(PROBES)} probes that it passes", share, 1, "==", ".2f")],
        notes=[
            f"{SAMPLES} samples in batches of 8, {BATCHES} per epoch, in their order; 2 worker processes; consumers "
            f"are processes that take {STEP * 1000:.0f} ms for a batch and look at it again after that. The same "
            "program for all. TensorSocket has `producer_batch_size=2`, with which it loses the least of an epoch, and "
            "its producer begins when the consumers that are to begin together are there. It has no choice of how to "
            "join and of what to do about a slow one. Samples that it loses at the end of every epoch count in the "
            "first row only. In the last column its tensors go by name through shared memory, as "
            "on a GPU, not pickled through a socket, so that its pool of buffers is what consumers look at. A killed "
            f"process got SIGKILL; a standstill of {PATIENCE:.0f} s ends the wait."
        ],
        versions=versions,
        raw=found,
    )


def _but_for_the_tail(facts: Json, tail: Json) -> Json:
    """`facts` without the samples that are missing at the end of every epoch anyway."""
    lost = min(tail.get("missing", [0]))
    changed = {"missing": [max(0, each - lost) for each in facts["missing"]]} if "missing" in facts else {}
    other = {"other": _but_for_the_tail(facts["other"], tail)} if "other" in facts else {}
    return facts | changed | other


def _cell(probe: Probe, facts: dict[str, Json], reason: str | None) -> str:
    if probe.name in facts:
        return probe.show(facts[probe.name])
    return str(reason) if reason else "no such choice" if probe.choice else "as beside"
