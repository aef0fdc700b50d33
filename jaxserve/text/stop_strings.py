"""Stop strings in a text that comes in pieces.

What could be the beginning of a stop string is held back, nothing else, and only while it could.
"""

from collections.abc import Sequence


class StopStrings:
  """Watches one text for strings that end it.

  The match that completes first wins, whatever the order of the list; of two that complete at the
  same character, the one listed first.
  """

  def __init__(self, stops: Sequence[str], *, include: bool = False):
    """Watches for `stops`, none of them empty.

    Args:
      stops: the strings.
      include: what is released ends with the string that matched, instead of before it.
    """
    self._stops = tuple(stops)
    self._include = include
    self._held = ""
    self.matched: str | None = None

  @property
  def held(self) -> str:
    """What is held back now."""
    return self._held

  def push(self, text: str) -> str:
    """Takes more text; returns what can be sent now. After a match, nothing more can."""
    if self.matched is not None:
      return ""
    if not self._stops:
      return text
    text = self._held + text
    found = self._find(text)
    if found is not None:
      begin, self.matched = found
      self._held = ""
      return text[: begin + len(self.matched)] if self._include else text[:begin]
    cut = len(text) - self._num_held(text)
    self._held = text[cut:]
    return text[:cut]

  def flush(self) -> str:
    """What was held back: the text has ended, so it was no stop string."""
    text, self._held = self._held, ""
    return text

  def _find(self, text: str) -> tuple[int, str] | None:
    begins = ((text.find(stop), stop) for stop in self._stops)
    found = [(begin, stop) for begin, stop in begins if begin >= 0]
    return min(found, key=lambda match: match[0] + len(match[1]), default=None)

  def _num_held(self, text: str) -> int:
    """Length of the longest end of `text` that a stop string, longer than that, begins with."""
    longest = min(max(map(len, self._stops)) - 1, len(text))
    for size in range(longest, 0, -1):
      end = text[-size:]
      if any(len(stop) > size and stop.startswith(end) for stop in self._stops):
        return size
    return 0
