"""Predictions agree with themselves: what is named as the limit is what helps, and what is advised gains."""

import copy
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from report_examples import make
from stallfree import Report
from stallfree.analysis.measure import combined, next_half_width
from stallfree.analysis.model import Setting
from stallfree.analysis.predict import Prediction

rate = st.floats(10, 1e5)
tied = st.sampled_from([100.0, 1000.0, 1010.0, 3000.0])  # so that parts are nearly equal often
any_rate = st.one_of(rate, tied)
CORES = {"prep": "more CPUs", "cpu": "more CPUs", "compute": "a faster device"}


class DoubleFetch(Report):
    """A report of the same job, whose storage and cache are twice as fast."""

    def setting(self, number: int | None = None) -> Setting:
        setting = super().setting(number)
        return replace(setting, rates=setting.rates.times(2, "storage", "cache"))


def doubled(report: Report, asked: dict[str, Any], parts: tuple[str, ...]) -> float:
    """Samples/s with these parts twice as fast."""
    changed = dict(asked)
    if {"prep", "cpu"} & set(parts):
        changed["cpus"] = 2 * (asked.get("cpus") or report.setting().cpus)
    if "compute" in parts:
        changed["devices"] = 2
    return (DoubleFetch(report.data) if "fetch" in parts else report).predict(**changed).throughput


def check(report: Report, asked: dict[str, Any]) -> Prediction:
    """What is said of `asked` holds, by further predictions."""
    told = report.predict(**asked)
    named = tuple(told.binds.split(" and "))
    assert set(named) <= {"fetch", "prep", "cpu", "compute"}
    cpu = "cpu" if "cpu" in named else "prep"
    gains = {part: doubled(report, asked, (part,)) / told.throughput for part in ("fetch", cpu, "compute")}
    best = max(gains.values())
    if best > 1.02:  # each that is named gains as much as any
        assert all(gains[part] >= 0.98 * best for part in named), (named, gains)
    else:  # none gains alone, all that are named gain together
        assert len(named) > 1
        assert doubled(report, asked, named) > 1.02 * told.throughput
    answers = {line.split(":")[0]: line.split(": ", 1)[1] for line in told.answers}
    for part, gain in gains.items():
        if part == "fetch":
            continue
        said = re.match(r"([\d.]+)x", answers[CORES[part]])
        assert (said is not None) == (gain > 1.02), (part, gain, answers)
        assert said is None or float(said[1]) == pytest.approx(gain, abs=0.006)
    if line := answers.get("faster storage"):
        data = copy.deepcopy(report.data)
        data["rates"]["S"]["value"] *= 2
        gain = Report(data).predict(**asked).throughput / told.throughput
        assert (re.match(r"([\d.]+)x", line) is not None) == (gain > 1.02)
    check_cache(report, asked, told, answers["cache"])
    return told


def check_cache(report: Report, asked: dict[str, Any], told: Prediction, line: str) -> None:
    full = report.predict(**{**asked, "cache": "100%"}).throughput
    if line.startswith("gains less"):
        assert full <= 1.041 * told.throughput
        return
    said = re.match(r"([\d.]+)x. Cache (\d+)% of the samples", line)
    assert said is not None
    assert told.hits * 100 < int(said[2])
    there = report.predict(**{**asked, "cache": f"{said[2]}%"}).throughput
    assert there / told.throughput == pytest.approx(float(said[1]), abs=0.006)
    assert full <= 1.021 * there


jobs = st.fixed_dictionaries(
    {
        "G": any_rate,
        "P": any_rate,
        "S": any_rate,
        "C": st.floats(100, 1e6),
        "hit": st.floats(1, 3),  # P of hits, as many times P
        "shared": st.one_of(st.just(1.0), st.floats(0.4, 1.0)),  # the warm job, as a share of min(P, G)
        "workers": st.integers(0, 8),
        "parted": st.booleans(),
        "host": st.sampled_from([1, 2, 24]),
    }
)
questions = st.fixed_dictionaries(
    {},
    optional={
        "cache": st.sampled_from(["0%", "35%", "90%", "100%"]),
        "cpus": st.sampled_from([1, 2, 5, 24]),
        "devices": st.sampled_from([1, 4]),
        "jobs": st.sampled_from([1, 3]),
    },
)


def report_of(job: dict[str, Any]) -> Report:
    rates = {name: job[name] for name in "GPSC"} | {"P_hit": job["P"] * job["hit"]}
    if not job["parted"]:
        rates["P"] = rates["P_hit"] = 1 / (1 / job["P"] + 1 / job["C"])
    rates["P_miss"] = rates["P"]
    rates["warm"] = job["shared"] * min(rates["P_hit"], rates["G"])
    rates["cold"] = min(rates["warm"], rates["S"])
    report = make(rates, parted=job["parted"], workers=job["workers"])
    report.data["machine"]["cpus"] = job["host"]
    return report


@settings(max_examples=20)
@given(jobs, questions)
def test_what_is_named_and_advised_is_what_helps(job: dict[str, Any], asked: dict[str, Any]) -> None:
    if asked.get("devices", 1) > 1:  # twice as many as those
        job, asked = {**job, "G": job["G"] * asked["devices"]}, {**asked, "devices": 1}
    check(report_of(job), asked)


ALIKE = {"G": 1000, "P": 1000, "S": 50_000, "warm": 1000, "cold": 1000}
ALONE = {"G": 1000, "P": 1000, "S": 50_000, "warm": 490, "cold": 480}  # what the job reached; its parts would give 495
FAST = {"G": 2984, "P": 1600, "S": 40_000, "warm": 1420, "cold": 1400}
HAND: list[tuple[dict[str, Any], int, dict[str, Any], str, float, list[str]]] = [
    (FAST, 2, {"cpus": 24, "cache": "100%"}, "compute", 2984, ["device: 2.00x", "more CPUs: gains less than 2%"]),
    (ALIKE, 4, {}, "prep and compute", 1000, ["Prep and the device are the limit", "more CPUs: gains less than 2%"]),
    (ALONE, 0, {}, "prep", 490, ["Prep is the limit"]),
    (ALONE, 0, {"cpus": 4}, "compute", 1000, []),
    ({"G": 100, "cold": 100, "warm": 100}, 4, {}, "compute", 100, ["The device is the limit", "device: 2.00x"]),
    ({"P": 200, "S": 5000, "cold": 200, "warm": 200}, 4, {}, "prep", 200, ["more CPUs: 2.00x. Take twice as many"]),
    ({"S": 50, "cold": 50}, 4, {}, "fetch", 50, ["Storage is the limit", "faster storage: 2.00x"]),
    ({**ALIKE, "S": 5000, "cold": 500, "warm": 500}, 4, {}, "cpu", 500, ["Work that shares the CPUs is the limit"]),
]


@pytest.mark.parametrize(("rates", "workers", "asked", "binds", "throughput", "said"), HAND)
def test_what_is_named_by_hand(
    rates: dict[str, Any], workers: int, asked: dict[str, Any], binds: str, throughput: float, said: list[str]
) -> None:
    report = make(rates, workers=workers)
    told = check(report, asked)
    assert (told.binds, told.throughput) == (binds, pytest.approx(throughput, rel=0.01))
    for words in said:
        assert words in f"{report.data['bottleneck']} {told}"


@pytest.mark.parametrize("on_device", [False, True])
def test_the_faster_place_of_prep_is_advised(on_device: bool) -> None:
    placement = {"on_device": on_device, "CPUs": 1000.0, "device": 3600.0}
    rate = 3600 if on_device else 1000
    report = make({"G": 4000, "P": rate, "S": 40_000, "warm": rate, "cold": rate}, placement=placement)
    advised = [item for item in report.data["advice"] if "decode" in item["do"]]
    assert [item["do"] for item in advised] == [] if on_device else ["Let the device decode: on_device=True"]
    assert [item["gain"] for item in advised] == [] if on_device else [pytest.approx(3.6)]
    assert Report(json.loads(json.dumps(report.data))).predict() == report.predict()


def in_rounds(rounds: int) -> Report:
    """A report of a machine whose speed, that of its storage too, drifts by 5% from round to round."""
    rng = np.random.default_rng(5)
    truth = {"G": 5000.0, "S": 300.0, "C": 5e4, "cold": 300.0} | dict.fromkeys(("P", "P_miss", "P_hit", "warm"), 900.0)
    speeds = 1 + 0.05 * rng.standard_normal(rounds) + 0.005 * rng.standard_normal((len(truth), rounds))
    rates = zip(truth.items(), speeds.tolist(), strict=True)
    return make({}, measured={name: combined([value * one for one in each]) for (name, value), each in rates})


def test_the_interval_is_that_of_the_predictions_of_all_rounds() -> None:
    report = in_rounds(5)
    for cache in ("0%", "100%"):
        told = report.predict(cache=cache)
        each = [report.setting(number).with_hits(report.hits_of(cache)).throughput for number in range(5)]
        half = pytest.approx(next_half_width(each))
        assert (told.throughput - told.low, told.high - told.throughput) == (half, half)  # type: ignore[operator]
        assert f"({told.low:,.0f} to {told.high:,.0f})" in str(told)
    report.data["machine"]["drift"] = 2.1 * next_half_width(each) / told.throughput
    assert (report.predict(cache=cache).low, in_rounds(2).predict().low) == (None, None)
    assert "no interval: the machine's own speed drifted by" in str(report.predict(cache=cache))
