"""Claims about the page in a real headless browser."""

import pytest
from browser import Page, find_browser
from toy_runs import main

WIDTHS = (1280, 390)
RUNS = ("passed", "failed", "incomplete")
SCROLLS = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
OVERFLOW = """
[...document.querySelectorAll("body *")].filter((e) => !e.closest("svg") &&
  e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
  .map((e) => e.outerHTML.slice(0, 90))
"""
SEEN = """
((e) => e !== null && e.checkVisibility() && e.getBoundingClientRect().height > 8)
(document.querySelector(%r))
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    program = find_browser()
    if program is None:
        pytest.skip("no chromium or google-chrome on PATH; install one to look at the report")
    with Page(program, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    main(folder)
    return {name: folder / name / "report.html" for name in RUNS}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_fetched_nothing_complains_and_nothing_sticks_out(page, reports, name, width):
    page.open(reports[name], width)
    assert page.requests == [reports[name].as_uri()]
    assert page.complaints == []
    assert page.run("innerWidth") == width
    for _ in ("folded", "unfolded"):
        assert page.run(SCROLLS) is False
        assert page.run(OVERFLOW) == []
        page.run("document.getElementById('unfold').click()")
    assert page.complaints == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", RUNS)
def test_the_verdict_stands_first_and_is_seen(page, reports, name, width):
    page.open(reports[name], width)
    assert page.run("document.querySelector('h1').innerText") == name.upper()
    assert page.run("document.querySelector('h1').getBoundingClientRect().top") < 300
    parts = ["h1", ".sentence", ".ladder", "#gates .gate .claim", "#gates .bar", "#faults .role"]
    for part in parts + (["svg.plot"] if name != "incomplete" else []):
        assert page.run(SEEN % part), part


def test_what_is_not_as_required_stands_open(page, reports):
    page.open(reports["failed"], 1280)
    opened = "[...document.querySelectorAll('.gate[open] > summary .mark')].map(e => e.innerText)"
    assert sorted(page.run(opened)) == ["ERROR", "FAIL", "NOT RUN"]
    roles = "[...document.querySelectorAll('#faults .role[open] code')].map(e => e.innerText)"
    assert {"learning_rate", "build_model"} <= set(page.run(roles))


def test_a_link_opens_what_it_points_to(page, reports):
    page.open(reports["passed"], 1280)
    gate = "document.getElementById('gate-m2-clip--test-once-after-accumulation')"
    assert page.run(f"{gate}.open") is False
    page.run("location.hash = 'gate-m2-clip--test-once-after-accumulation'")
    page.call(
        "Runtime.evaluate", expression="new Promise(requestAnimationFrame)", awaitPromise=True
    )
    assert page.run(f"{gate}.open") is True


def test_print_opens_all_but_folded_gates_and_puts_it_back(page, reports):
    page.open(reports["passed"], 1280)
    num_closed = "document.querySelectorAll('details:not([open])').length"
    before = page.run(num_closed)
    assert before > 20
    page.run("window.dispatchEvent(new Event('beforeprint'))")
    assert page.run(num_closed) == page.run("document.querySelectorAll('.gate').length")
    page.run("window.dispatchEvent(new Event('afterprint'))")
    assert page.run(num_closed) == before


@pytest.mark.parametrize(("width_in", "height_in"), [(8.27, 11.69), (8.5, 11)])
def test_it_prints(page, reports, width_in, height_in):
    page.open(reports["failed"], 1280)
    size = {"paperWidth": width_in, "paperHeight": height_in}
    printed = page.call("Page.printToPDF", preferCSSPageSize=False, **size)
    assert len(printed["data"]) > 50_000


def test_without_scripts_everything_stands_open(page, reports):
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.open(reports["passed"], 1280)
    assert page.run("document.querySelectorAll('details:not([open])').length") == 0
    page.call("Emulation.setScriptExecutionDisabled", value=False)
