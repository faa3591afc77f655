"""The model of speed, and reports made by hand with what they predict: what is named as the limit is what helps."""

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from report_examples import make
from stallfree import InputError, Report
from stallfree.analysis import measure
from stallfree.analysis.measure import Rate, combined, measure_rate, next_half_width
from stallfree.analysis.model import Costs, Option, Rates, Setting, choose
from stallfree.analysis.predict import Prediction
from stallfree.analysis.report import report_page

rate = st.floats(10, 1e5)


def job(g: float, p: float, s: float, hits: float = 0.0, workers: int = 2, overlap: bool = True) -> Setting:
    return Setting(Rates(g, p, p, s, 1e9), hits, 2, workers, overlap, None, None, 100)


def test_law() -> None:
    assert [job(400, 300, 100, hits).throughput for hits in (0, 0.5, 1)] == [100, pytest.approx(200), 300]
    assert job(100, 300, 200).throughput == 100
    assert job(400, 300, 100, overlap=False).throughput == pytest.approx(75), "a worker alternates fetch and prep"
    assert job(100, 100, 100, workers=0).throughput == pytest.approx(100 / 3)


@given(rate, rate, rate)
def test_the_knee_is_where_fetching_stops_to_bind(g: float, p: float, s: float) -> None:
    limit = min(g, p) / 1.02
    exact = (1 / limit - 1 / s) / (1 / 1e9 - 1 / s) if s < limit else 0.0
    assert job(g, p, s).enough_cache() == pytest.approx(exact, abs=0.0101)


@pytest.mark.parametrize(("times", "warm_up", "rate", "lasts"), [
    ([4.0, *[0.1] * 50], 1, 80, 6.0),  # the warm-up takes longer than the run, and is not timed
    ([0.5] * 3, 1, 16, 1.5),  # the batches end early
    ([6.0] * 9, 10, 8 / 6, 6.0),  # slow batches are timed in spite of a long warm-up
    ([0.1] * 50, 0, 80, 2.0), ([0.5], 1, None, 0.5), ([], 0, None, 0.0),
])  # fmt: skip
def test_what_is_timed(times: Any, warm_up: int, rate: Any, lasts: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def batches() -> Iterator[int]:
        for each in times:
            now[0] += each
            yield 8

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert measure_rate(batches(), warm_up, 2.0) == (rate and pytest.approx(rate))
    assert now[0] - 100 == pytest.approx(lasts, abs=0.11)


def test_the_intervals_of_rounds_hold_the_truth_nearly_always() -> None:
    rounds = 100 * (1 + 0.05 * np.random.default_rng(3).standard_normal((400, 4)))
    means = [combined(list(map(float, row))) for row in rounds[:, :3]]
    assert np.mean([mean.low < 100 < mean.high for mean in means]) > 0.92  # type: ignore[operator]
    inside = [abs(row[3] - row[:3].mean()) < next_half_width(row[:3]) for row in rounds]
    assert np.mean(inside) > 0.92, "the next figure is in the prediction interval"
    for uncertain in ([80.0], [80.0, 80.0], [10.0, 100.0, 10.0]):
        mean = combined(uncertain)
        assert (mean.value, mean.low, mean.high) == (pytest.approx(np.mean(uncertain)), None, None)
    assert combined([None, None], "no file").note == "no file"
    assert combined([None, 4.0, 4.0, 4.0]).rounds == [4.0, 4.0, 4.0]


def test_shares_are_differences_of_times() -> None:
    data = make({"G": 1000, "P": 500, "S": 250, "cold": 250, "warm": 500}).data
    cold, warm = data["shares"]["cold"], data["shares"]["warm"]
    assert cold == pytest.approx({"compute": 0.25, "copy": 0, "prep_stall": 0.25, "fetch_stall": 0.5})
    assert warm == pytest.approx({"compute": 0.5, "copy": 0, "prep_stall": 0.5, "fetch_stall": 0})
    warm = make({"G": 1000, "copy": 2000, "warm": 500, "cold": 500}).data["shares"]["warm"]
    assert warm == pytest.approx({"compute": 0.5, "copy": 0.25, "prep_stall": 0.25, "fetch_stall": 0})


def test_predictions_are_the_formula() -> None:
    report = make({})
    found = report.predict(cache="50%", cpus=8, storage="25MB/s", devices=4)
    assert found.F == pytest.approx(1 / (0.5 / 50_000 + 0.5 / 500))
    assert found.P == pytest.approx(2000 * 8 / report.setting().cpus)
    assert (found.G, found.binds) == (4000, "fetch")
    assert found.throughput == pytest.approx(found.F, rel=0.01)
    assert found.now == pytest.approx(250, rel=0.01)
    assert [report.hits_of(size) for size in (5_000 * 50_000, "1TB", "12.5%")] == [0.5, 1.0, 0.125]
    shared = report.predict(cache="50%", jobs=4)
    assert (shared.F, shared.G) == (pytest.approx(report.predict(cache="50%").F / 4), 1000)
    # F reaches 1000 / 1.02, within 2% of G, where 1.02/1000 = x/50000 + (1-x)/250: the end of the fetch stall
    assert report.data["curve"]["best"] == pytest.approx((1 / 250 - 1.02 / 1000) / (1 / 250 - 1 / 50_000), abs=0.01)
    assert report.data["advice"][0]["do"].startswith("Cache 75% of the samples")
    assert report.data["advice"][0]["gain"] == pytest.approx(4, rel=0.02)


def prepared(storage: float, *, random: float = 1e-4) -> Option:
    """What `cache="auto"` chooses for prep of 10 ms per sample, all of it deterministic but `random` seconds."""
    hit, size = {"fetched": 0.01, "prepared": random}, {"fetched": 50_000.0, "prepared": 20_000.0}
    return choose(Costs(10_000, storage, 0.010, hit, {"fetched": 1e-5, "prepared": 1e-5}, size), 1 << 30, 4)


PREP_BOUND: dict[str, float | None] = {"G": 5000, "P": 400, "S": 3000, "cold": 400, "warm": 400}


def test_the_librarys_own_remedies_come_first_with_what_they_take() -> None:
    """Hardware comes last, however much it gains, and one cache is advised."""
    report = make(PREP_BOUND, remedy=prepared(3000))
    first, *others = report.data["advice"]
    assert first["do"].startswith("Use sf.DataLoader(dataset, 32, cache='auto', capacity='200.3 MiB')")
    assert first["gain"] == pytest.approx(5000 / 400, rel=0.05)
    assert "P 40,000" in first["why"]
    assert first["why"].endswith("takes 190.7 MiB of memory")
    assert first["memory_bytes"] == 10_000 * 20_000
    assert [item["do"].split(" (")[0] for item in others] == ["Take twice as many CPUs"]
    assert "1. Use sf.DataLoader(dataset, 32, cache='auto'" in str(report)
    advice = make(PREP_BOUND, remedy=prepared(3000, random=0.007)).data["advice"]
    hardware = [item["do"].startswith(("Take twice", "Put the", "Use a device")) for item in advice]
    assert hardware == sorted({*hardware}) == [False, True]
    assert advice[0]["gain"] < advice[-1]["gain"], "more CPUs gain more"
    advice = make({"P": 400, "G": 5000, "S": 100, "cold": 100, "warm": 400}, remedy=prepared(100)).data["advice"]
    assert sum("cache" in item["do"].lower() for item in advice) == 1


def test_of_two_equal_forms_that_of_less_prep_is_chosen() -> None:
    hit, read = {"fetched": 0.009, "prepared": 0.001}, dict.fromkeys(("fetched", "prepared"), 0.01)
    costs = Costs(1000, 10, 0.02, hit, read, dict.fromkeys(hit, 100.0))
    assert (choose(costs, 1 << 20, 1).form, choose(costs, 1 << 20, 1).rate) == ("prepared", pytest.approx(100))


def test_a_loader_that_shares_the_cpus_is_as_fast_as_it_was() -> None:
    """The device is not a CPU: what the job lacks of min(P, G) is the loader's."""
    report = make({"G": 5000, "P": 1000, "S": 5000, "cold": 500, "warm": 500})
    report.data["machine"]["device"] = "cuda"
    assert report.predict().throughput == pytest.approx(500, rel=0.01)


def test_what_was_not_measured_limits_nothing_and_is_said() -> None:
    report = make({"S": None, "C": None}, parted=False)
    assert report.data["rates"]["F"]["value"] is None
    assert report.predict().throughput > 0
    with pytest.raises(InputError, match="the size of a sample is not known"):
        report.predict(storage="100MB/s")


def test_saved_and_loaded(tmp_path: Path) -> None:
    report, path = make({}), tmp_path / "report.json"
    report.save(path)
    again = Report.load(path)
    assert again.data == report.data
    assert str(again) == str(report)
    for content, message in (
        ("{", "cannot be read as a report"), ("[]", "cannot be read as a report"),
        ('{"format": "stallfree-report", "version": 99}', "'version': 99}, expected .*'version': 1}"),
    ):  # fmt: skip
        path.write_text(content)
        with pytest.raises(InputError, match=message):
            Report.load(path)


def test_a_loader_that_fetches_and_prepares_in_turn_gains_from_every_hit() -> None:
    report = make({"G": 1e6, "P": 800, "S": 200, "C": 50_000, "cold": 160, "warm": 790}, parted=False)
    told = [report.predict(cache=f"{share}%").throughput for share in (0, 25, 50, 75, 100)]
    assert told == sorted(told)
    assert told[0] == pytest.approx(1 / (1 / 200 + 1 / 800), rel=0.1)
    assert report.data["curve"]["best"] > 0.9
    assert any("stallfree.DataLoader" in item["do"] for item in report.data["advice"])


def test_what_is_uncertain_is_said() -> None:
    data = make({}, measured={"S": Rate(1.0, rounds=[0.1, 1.9]), "cold": Rate(64.0, rounds=[64.0])}).data
    assert data["advice"] == []
    assert data["bottleneck"].startswith("Too few rounds to say what limits: S, cold vary too much")
    assert "no change that was looked at" not in report_page(data)


any_rate = rate | st.sampled_from([100.0, 1000.0, 1010.0, 3000.0])  # often, parts are nearly equal
CHANGES = {"prep": "more CPUs", "cpu": "more CPUs", "compute": "a faster device", "storage": "faster storage"}


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
    del gains["fetch"]
    if "faster storage" in answers:
        data = copy.deepcopy(report.data)
        data["rates"]["S"]["value"] *= 2
        gains["storage"] = Report(data).predict(**asked).throughput / told.throughput
    for part, gain in gains.items():
        said = re.match(r"([\d.]+)x", answers[CHANGES[part]])
        assert (said is not None) == (gain > 1.02), (part, gain, answers)
        assert said is None or float(said[1]) == pytest.approx(gain, abs=0.006)
    full = report.predict(**{**asked, "cache": "100%"}).throughput
    said = re.match(r"([\d.]+)x. Cache (\d+)% of the samples", answers["cache"])
    assert (said is None) == answers["cache"].startswith("gains less")
    if said is None:
        assert full <= 1.041 * told.throughput
    else:
        assert told.hits * 100 < int(said[2])
        there = report.predict(**{**asked, "cache": f"{said[2]}%"}).throughput
        assert there / told.throughput == pytest.approx(float(said[1]), abs=0.006)
        assert full <= 1.021 * there
    return told


jobs = st.fixed_dictionaries({
    **dict.fromkeys("GPS", any_rate), "C": st.floats(100, 1e6), "hit": st.floats(1, 3),  # P of hits, as many times P
    "shared": st.one_of(st.just(1.0), st.floats(0.4, 1.0)),  # the warm job, as a share of min(P, G)
    "workers": st.integers(0, 8), "parted": st.booleans(), "host": st.sampled_from([1, 2, 24]),
})  # fmt: skip
questions = st.fixed_dictionaries({}, optional={
    "cache": st.sampled_from(["0%", "35%", "90%", "100%"]), "cpus": st.sampled_from([1, 2, 5, 24]),
    "devices": st.sampled_from([1, 4]), "jobs": st.sampled_from([1, 3]),
})  # fmt: skip


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
    (ALONE, 0, {}, "prep", 490, ["Prep is the limit"]), (ALONE, 0, {"cpus": 4}, "compute", 1000, []),
    ({"G": 100, "cold": 100, "warm": 100}, 4, {}, "compute", 100, ["The device is the limit", "device: 2.00x"]),
    ({"P": 200, "S": 5000, "cold": 200, "warm": 200}, 4, {}, "prep", 200, ["more CPUs: 2.00x. Take twice as many"]),
    ({"S": 50, "cold": 50}, 4, {}, "fetch", 50, ["Storage is the limit", "faster storage: 2.00x"]),
    ({**ALIKE, "S": 5000, "cold": 500, "warm": 500}, 4, {}, "cpu", 500, ["Work that shares the CPUs is the limit"]),
]  # fmt: skip


@pytest.mark.parametrize(("rates", "workers", "asked", "binds", "throughput", "said"), HAND)
def test_what_is_named_by_hand(rates: Any, workers: int, asked: Any, binds: str, throughput: float, said: Any) -> None:
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
    expected = [] if on_device else [("Let the device decode: on_device=True", pytest.approx(3.6), 3600)]
    assert [(item["do"], item["gain"], item["throughput"]) for item in advised] == expected
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
