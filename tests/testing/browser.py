"""A headless Chromium, spoken to over the DevTools protocol on a pipe: no driver, no package."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find():
  """The browser's path, or None."""
  return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
  """One page."""

  def __init__(self, browser, session):
    self._browser, self._session = browser, session

  def call(self, method, **params):
    return self._browser.call(method, params, self._session)

  def run(self, script):
    """The value of an expression; an error where it throws."""
    done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
    assert "exceptionDetails" not in done, done
    return done["result"].get("value")

  def until(self, script, seconds=30):
    """Waits for an expression to be true; its value."""
    deadline = time.monotonic() + seconds
    while not (value := self.run(script)):
      assert time.monotonic() < deadline, f"never true: {script}"
      time.sleep(0.05)
    return value

  def key(self, name, code):
    for kind in ("rawKeyDown", "char", "keyUp"):
      text = {"text": "\r"} if kind == "char" and name == "Enter" else {}
      self.call("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code, **text)

  def type(self, text):
    self.call("Input.insertText", text=text)

  def click(self, element_id):
    x, y = self.run(
      f"(() => {{ const e = document.getElementById('{element_id}'); e.scrollIntoView();"
      "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })()"
    )
    for kind in ("mousePressed", "mouseReleased"):
      self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

  def roles(self):
    """Pairs of role and name of everything that a screen reader is told of."""
    nodes = self.call("Accessibility.getFullAXTree")["nodes"]
    seen = (node for node in nodes if not node["ignored"])
    return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in seen]

  def screenshot(self):
    """PNG of the whole page."""
    shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
    return base64.b64decode(shot["data"])


class Browser:
  """The process and its pipe."""

  def __init__(self, profile):
    to_read, self._write = os.pipe()
    self._read, to_write = os.pipe()
    command = [
      find(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
      "--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip
    shell = f'exec "$@" 3<&{to_read} 4>&{to_write}'
    self._process = subprocess.Popen(
      ["bash", "-c", shell, "-", *command], pass_fds=(to_read, to_write),
      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_read)
    os.close(to_write)
    self._reader, self._last, self._rest = os.fdopen(self._read, "rb", 0), 0, b""
    self.events = []

  def call(self, method, params=None, session=None):
    self._last += 1
    message = {"id": self._last, "method": method, "params": params or {}}
    message |= {"sessionId": session} if session else {}
    os.write(self._write, json.dumps(message).encode() + b"\0")
    while True:
      reply = self._message()
      if reply.get("id") == self._last:
        assert "error" not in reply, (method, reply["error"])
        return reply["result"]
      self.events.append(reply)

  def _message(self):
    while b"\0" not in self._rest:
      part = self._reader.read(1 << 16)
      assert part, "the browser has ended"
      self._rest += part
    message, _, self._rest = self._rest.partition(b"\0")
    return json.loads(message)

  def open(self, url, width=1200, height=1300):
    target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
    session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
    page = Page(self, session)
    for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
      page.call(f"{domain}.enable")
    sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    page.call("Emulation.setDeviceMetricsOverride", **sizes)
    page.call("Page.navigate", url=url)
    page.until("location.href !== 'about:blank' && document.readyState === 'complete'")
    return page

  def requested(self):
    """Every address that a page asked for."""
    asked = (e for e in self.events if e.get("method") == "Network.requestWillBeSent")
    return {event["params"]["request"]["url"] for event in asked}

  def complaints(self):
    """Exceptions of scripts, errors and warnings in the log."""
    kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
    said = [e["params"] for e in self.events if e.get("method") in kinds]
    return [p for p in said if p.get("entry", {}).get("level", "error") in ("error", "warning")]

  def close(self):
    with contextlib.suppress(OSError, AssertionError):
      self.call("Browser.close")
    self._process.wait(20)
    os.close(self._write)
    self._reader.close()


@contextlib.contextmanager
def opened(profile):
  browser = Browser(profile)
  try:
    yield browser
  finally:
    browser.close()
