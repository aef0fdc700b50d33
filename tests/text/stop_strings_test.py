"""Stop strings: nothing leaks, nothing is held too long, the first to complete wins."""

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxserve.text.stop_strings import StopStrings

# (pieces, stops, what is released in all)
STREAMS = {
  "over tokens": (["The", " quick", " brown", " fox", " jumps"], ["own fox"], "The quick br"),
  "over many": (["ABC", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"], "ABC"),
  "at once": (["\nUser", ":"], ["\nUser:"], ""),
  "with a space": (["alpha", " beta", " gamma", " delta"], ["beta gamma"], "alpha "),
  "inside a token": (["a", "stop!"], ["stop"], "a"),
}


@pytest.mark.parametrize(("pieces", "stops", "want"), STREAMS.values(), ids=STREAMS.keys())
def test_what_a_stream_releases(pieces, stops, want):
  matcher = StopStrings(stops)
  assert "".join(map(matcher.push, pieces)) == want
  assert matcher.matched == stops[0] and matcher.flush() == ""


# (text before, new text, stops, include) -> (the stop, what is released in all)
STEPS = [
  (" The user", " is a", ["a", "is"], False, "is", " The user "),
  (" The user", " is a", ["is", "a"], True, "is", " The user is"),
  ("", "abc", ["abc", "b"], False, "b", "a"),
  ("", "ab", ["ab", "b"], False, "ab", ""),
  ("", "ab", ["b", "ab"], False, "b", "a"),
  ("hello world", ".", ["."], False, ".", "hello world"),
  ("hello world", ".", ["."], True, ".", "hello world."),
  ("", "hello", ["zzz"], False, None, "hello"),
  ("", "hello", [], False, None, "hello"),
]


@pytest.mark.parametrize(("before", "new", "stops", "include", "stop", "want"), STEPS)
def test_the_match_that_completes_first_wins(before, new, stops, include, stop, want):
  matcher = StopStrings(stops, include=include)
  assert matcher.push(before) + matcher.push(new) + matcher.flush() == want
  assert matcher.matched == stop


def test_only_what_could_begin_a_stop_string_is_held():
  matcher = StopStrings(["<|end|>"])
  assert matcher.push("hello world") == "hello world"
  assert matcher.push("a <|e") == "a "
  assert matcher.push("x") == "<|ex"
  assert matcher.push("<") == "" and matcher.flush() == "<"


def oracle(text, stops, include):
  """Character by character."""
  for end in range(1, len(text) + 1):
    for stop in stops:
      if text[:end].endswith(stop):
        return text[: end if include else end - len(stop)], stop
  return text, None


@hypothesis.given(
  pieces=st.lists(st.text("abc", max_size=4), max_size=12),
  stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
  include=st.booleans(),
)
def test_any_cut_of_any_text(pieces, stops, include):
  matcher = StopStrings(stops, include=include)
  text, released = "", ""
  want, stop = oracle("".join(pieces), stops, include)
  for piece in pieces:
    text += piece
    released += matcher.push(piece)
    assert want.startswith(released)
    held = text[len(released) :]
    assert matcher.matched or not held or any(s.startswith(held) and s != held for s in stops)
  assert released + matcher.flush() == want and matcher.matched == stop
