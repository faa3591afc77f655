"""Reports and what they predict, with rates made by hand."""

from pathlib import Path

import pytest

from report_examples import make
from stallfree import InputError, Report
from stallfree.analysis.measure import Rate
from stallfree.analysis.model import Costs, Option, choose
from stallfree.analysis.report import report_page


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
    assert found.P == pytest.approx(2000 * 2 if report.setting().cpus == 4 else 2000 * 8 / report.setting().cpus)
    assert found.G == 4000
    assert found.binds == "fetch"
    assert found.throughput == pytest.approx(found.F, rel=0.01)
    assert found.now == pytest.approx(250, rel=0.01)
    assert [report.hits_of(size) for size in (5_000 * 50_000, "1TB", "12.5%")] == [0.5, 1.0, 0.125]
    assert "(storage of 530 MB/s)" in str(report.predict(storage="530MB/s"))
    shared = report.predict(cache="50%", jobs=4)
    assert shared.F == pytest.approx(report.predict(cache="50%").F / 4)
    assert shared.G == 1000


def test_the_end_of_the_fetch_stall_is_told() -> None:
    report = make({})  # F reaches 1000 / 1.02, within 2% of G, where 1.02/1000 = x/50000 + (1-x)/250
    best = report.data["curve"]["best"]
    assert best == pytest.approx((1 / 250 - 1.02 / 1000) / (1 / 250 - 1 / 50_000), abs=0.01)
    assert report.data["advice"][0]["do"].startswith("Cache 75% of the samples")
    assert report.data["advice"][0]["gain"] == pytest.approx(4, rel=0.02)


def prepared(storage: float, *, random: float = 1e-4) -> Option:
    """What `cache="auto"` chooses for prep of 10 ms per sample, all of it deterministic but `random` seconds."""
    hit, size = {"fetched": 0.01, "prepared": random}, {"fetched": 50_000.0, "prepared": 20_000.0}
    costs = Costs(10_000, storage, 0.010, hit, {"fetched": 1e-5, "prepared": 1e-5}, size)
    return choose(costs, 1 << 30, 4)


PREP_BOUND: dict[str, float | None] = {"G": 5000, "P": 400, "S": 3000, "cold": 400, "warm": 400}


def test_the_librarys_own_remedies_come_first_with_what_they_take() -> None:
    advice = make(PREP_BOUND, remedy=prepared(3000)).data["advice"]
    first = advice[0]
    assert first["do"].startswith("Use sf.DataLoader(dataset, 32, cache='auto', capacity='200.3 MiB')")
    assert first["gain"] == pytest.approx(5000 / 400, rel=0.05)
    assert "P 40,000" in first["why"]
    assert first["why"].endswith("takes 190.7 MiB of memory")
    assert first["memory_bytes"] == 10_000 * 20_000
    assert [item["do"].split(" (")[0] for item in advice[1:]] == ["Take twice as many CPUs"]
    assert "1. Use sf.DataLoader(dataset, 32, cache='auto'" in str(make(PREP_BOUND, remedy=prepared(3000)))


def test_hardware_comes_last_however_much_it_gains_and_one_cache_is_advised() -> None:
    advice = make(PREP_BOUND, remedy=prepared(3000, random=0.007)).data["advice"]
    order = [(item["do"].startswith(("Take twice", "Put the", "Use a device")), -item["gain"]) for item in advice]
    assert order == sorted(order)
    assert order[0][0] < order[-1][0]
    assert order[0][1] > order[-1][1], "more CPUs gain more"
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
    with pytest.raises(InputError, match="does not know how many bytes"):
        report.predict(storage="100MB/s")


def test_saved_and_loaded(tmp_path: Path) -> None:
    report, path = make({}), tmp_path / "report.json"
    report.save(path)
    again = Report.load(path)
    assert again.data == report.data
    assert str(again) == str(report)
    for content, message in (
        ("{", "cannot be read as a report"),
        ("[]", "cannot be read as a report"),
        ('{"format": "stallfree-report", "version": 99}', "'version': 99}, expected .*'version': 1}"),
        ('{"format": "stallfree-report", "version": 1}', "with all parts"),
    ):
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
    slower = "not slower with cold files (250 samples/s) than with all data in memory (200)"
    for warm, said in ((260, False), (200, True)):
        assert any(slower in note for note in make({"cold": 250, "warm": warm}).data["notes"]) == said
