"""The live page in a headless Chromium: type, stream, inject, see bars, move the slider."""

import os

import pytest

from jaxserve import sched
from tests.testing import browser, servers

pytestmark = pytest.mark.skipif(browser.find() is None, reason="not installed: chromium")
PIXELS = """(() => {
  const c = document.getElementById('%s'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data
  const colors = new Set(); let filled = 0
  for (let i = 0; i < d.length; i += 4) if (d[i + 3] > 200) { filled++; colors.add(`${d[i]},${d[i + 1]},${d[i + 2]}`) }
  return { filled, colors: [...colors] } })()"""  # noqa: E501
DECODE, PREFILL = "31,119,180", "232,118,26"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
  with servers.running() as run, browser.opened(tmp_path_factory.mktemp("profile")) as chromium:
    page = chromium.open(run.url + "/")
    page.until("settings !== null")
    page.chromium, page.server = chromium, run
    yield page
    assert {url.startswith((run.url, "data:")) for url in chromium.requested()} == {True}
    assert [c for c in chromium.complaints() if "favicon" not in str(c)] == []
  servers.served().engine.set_params(sched.make_params(servers.SCHEDULER))


def steps(page):
  return page.run("steps.map(s => [s.step, s.budget, s.decode, s.prefill])")


def test_a_chat_by_keyboard_alone(page):
  page.run("document.getElementById('text').focus()")
  page.type("Hi")
  page.key("Enter", 13)
  page.until("document.querySelectorAll('#log p').length === 2")
  page.until("running === null")
  assert page.run("document.querySelector('#log .you').textContent") == "Hi"
  assert page.run("document.querySelector('#log p:last-child').textContent") not in ("", "…")
  assert page.run("document.querySelectorAll('#log .error').length") == 0
  page.until("steps.length > 3")
  assert page.run("document.getElementById('summary').textContent").startswith(("Step", "Ready"))


def test_streams_and_a_long_prompt_are_drawn(page):
  page.click("streams")
  page.until("steps.some(s => s.decode >= 3)")
  page.click("inject")
  page.until("steps.some(s => s.decode >= 2 && s.prefill > 4)")
  page.until("steps.length && steps[steps.length - 1].running === 0", 60)
  page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
  page.run("draw()")
  for name in ("bars", "gantt"):
    drawn = page.run(PIXELS % name)
    assert drawn["filled"] > 500 and {DECODE, PREFILL} <= set(drawn["colors"]), (name, drawn)
  assert page.run(PIXELS % "times")["filled"] > 500
  placed, lanes = page.run("lanes(steps)")
  assert 4 <= lanes <= 8  # the streams and the prompt side by side; lanes are used again
  assert len(placed) == len(steps(page))
  page.until(
    f"document.getElementById('kv-now').textContent.endsWith('of {servers.NUM_PAGES} pages')"
  )  # once a second


def test_the_slider_changes_the_budget(page):
  page.run("document.getElementById('budget').focus()")
  for _ in range(4):
    page.key("ArrowLeft", 37)
  page.until("settings.budget === 12")
  assert page.server.get("/live/settings").json()["budget"] == 12
  for _ in range(2):  # the second is not found in the prefix cache
    page.run("steps = []")
    page.click("inject")
    page.until("steps.some(s => s.budget === 12 && s.prefill === 12)")
  assert page.run("document.getElementById('budget-now').value") == "12"


def test_everything_has_a_role_and_a_name(page):
  page.until("document.getElementById('summary').textContent.startsWith('Step')")  # once a second
  roles = page.roles()
  for role, name in (
    ("heading", "Tokens of each step"), ("slider", "Budget"), ("button", "Start 4 streams"),
    ("button", "Inject a long prompt"), ("textbox", "Message"), ("button", "Send"),
    ("button", "Stop"), ("log", "Chat"), ("status", None), ("link", "metrics"),
    ("spinbutton", "Target (ms)"), ("meter", None),
  ):  # fmt: skip
    assert any(r == role and (name is None or n.startswith(name)) for r, n in roles), (role, name)
  pictures = [name for role, name in roles if role in ("image", "img")]
  assert len(pictures) == 3 and all("Step" in name for name in pictures)  # they say it in words
  controls = ("button", "slider", "textbox", "spinbutton", "link", "image", "img")
  assert all(name for role, name in roles if role in controls)


def test_it_can_be_looked_at(page, tmp_path):
  picture = page.screenshot()
  assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
  (tmp_path / "page.png").write_bytes(picture)
  if kept := os.environ.get("JAXSERVE_SCREENSHOT"):
    with open(kept, "wb") as file:
      file.write(picture)
