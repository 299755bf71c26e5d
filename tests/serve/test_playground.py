"""The playground in a real browser, against the running service; makes the README's screenshot."""

import os
import shutil
from pathlib import Path

import pytest

from tests.serve.conftest import KEYS
from ucm_ray.bench.data import load_documents

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCREENSHOT = Path(__file__).parents[2] / "docs" / "playground.png"

pytestmark = [
    pytest.mark.service, pytest.mark.timeout(900),
    pytest.mark.skipif(BROWSER is None, reason="no browser here: install chromium (apt install chromium)"),
]


@pytest.fixture(scope="module")
def page(service):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1240, "height": 1500})
        page.set_default_timeout(300_000)
        page.problems = []
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("request", lambda request: request.url.startswith(service.url) or page.problems.append(request.url))
        page.goto(f"{service.url}/ucm/")
        yield page
        browser.close()


def test_documents_are_stored_shuffled_and_asked_with_and_without_blend(page):
    page.fill("#key", KEYS[0])
    page.dispatch_event("#key", "change")
    page.wait_for_selector("#examples option", state="attached")
    page.click("#add8")
    assert page.locator("#documents li").count() == 8
    ends = page.evaluate("[...document.querySelectorAll('#documents, #documents button')]"
                         ".map((one) => one.getBoundingClientRect().right)")
    assert max(ends[1:]) < ends[0], "the buttons of the documents are cut off"
    page.fill("#paste", "The lighthouse of Kolka stands on an island that was built of stones.")
    page.click("#add")
    page.click("#ingest")
    page.wait_for_function("document.getElementById('stored').textContent.includes('chunks')")
    order = page.locator("#documents .text").all_inner_texts()
    page.click("#shuffle")
    assert sorted(page.locator("#documents .text").all_inner_texts()) == sorted(order)

    page.fill("#question", load_documents()[0].questions[0].question)
    page.fill("#tokens", "24")
    page.click("#ask")
    page.wait_for_function("document.getElementById('summary').textContent.includes('reused')")
    assert page.locator("#error").inner_text() == ""
    times = [float(page.locator(f"#{side} .ttft").inner_text().removesuffix(" s")) for side in ("plain", "blend")]
    assert all(page.locator(f"#{side} .answer").inner_text().strip() for side in ("plain", "blend"))
    assert times[1] < times[0], "blending was not faster"
    assert "reused" in page.locator("#blend .receipt").inner_text()

    coloured = {kind: "".join(page.locator(f"#prompt .{kind}").all_inner_texts())
                for kind in ("reused", "recomputed", "computed")}
    assert len(coloured["reused"]) > 5 * len(coloured["recomputed"]) > 0
    assert load_documents()[0].questions[0].question[-20:] in coloured["computed"].replace("\n", " ")


def test_the_curve_of_policies_is_drawn(page):
    page.click("#curve")
    page.wait_for_function("document.querySelectorAll('#chart circle').length === 13", timeout=600_000)
    assert page.locator("#chart polyline").count() == 3 and page.locator("#chart td").count() == 18
    assert page.locator("#error").inner_text() == ""


def test_the_page_asks_nobody_else_throws_nothing_and_can_be_shown(page, tmp_path):
    """With UCM_RAY_SCREENSHOT=1 the picture goes to `docs/playground.png`, for the README."""
    assert page.problems == []
    picture = SCREENSHOT if os.environ.get("UCM_RAY_SCREENSHOT") else tmp_path / "playground.png"
    page.evaluate("document.getElementById('key').value = ''")
    page.screenshot(path=str(picture), full_page=True)
    assert picture.stat().st_size > 20_000


def test_a_wrong_key_is_said_on_the_page(page):
    page.fill("#key", "wrong")
    page.dispatch_event("#key", "change")
    page.click("#ingest")
    page.wait_for_function("document.getElementById('error').textContent.includes('API key')")
