"""Records of the benchmarks, their pages and figures."""

import json
import re
import sys

import pytest
import report


def check(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["report.py", "--check"])
    with pytest.raises(SystemExit) as result:
        report.main()
    return result.value.code


def test_page_and_figures_show_the_records(monkeypatch):
    assert check(monkeypatch) == 0


def test_figure_of_another_record_is_stale(tmp_path, monkeypatch):
    record = report.read("ice_lake")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(report, "GOALS_PAGE", tmp_path / "goals.md")
    for page in (report.PAGE, report.GOALS_PAGE):
        page.write_text("<!-- headline: begin -->\n<!-- headline: end -->\n")
    for change in (1, 2):
        record["rows"][1]["ratio"] *= change
        (tmp_path / "ice_lake.json").write_text(json.dumps(record))
        report.publish()
        assert "ice_lake.png" in check(monkeypatch)
        report.plot("ice_lake")
        assert check(monkeypatch) == 0


@pytest.mark.parametrize("kind", report.KINDS)
def test_columns_say_what_the_baselines_of_a_kind_are(kind):
    page = (report.RESULTS / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.MULTILINE)
    on_page = {name for name, of in rows if of == kind}
    timed = {row["provider"] for row in report.read("ice_lake")["rows"]}
    assert set(report.KINDS[kind]) & timed <= on_page <= set(report.KINDS[kind])
