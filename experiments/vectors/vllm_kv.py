"""vLLM KV operation lists on `jaxserve.cache`, with and without a prefix cache.

Page ids start at 1 there and at 0 here. Prompts are told in words; what a description leaves open
is read so that prompts differ, except for a lookup that names a single token: it stands for the
first prompt of the list, cut or continued.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from experiments.vectors.outcome import Differs, Unsupported, equal, known_fields
from jaxserve import cache
from jaxserve.cache import prefix

SCENARIO = ("name", "source", "kind", "note", "config", "ops")
CONFIG = (
  "block_size", "num_blocks", "usable_blocks", "prefix_caching", "max_model_len",
  "drop_last_hit_block",
)  # fmt: skip
OP_FIELDS = {
  "allocate": ("op", "id", "prompt", "new_tokens", "lookahead", "expect", "full_prompt_must_fit"),
  "free": ("op", "id", "expect"),
  "lookup": ("op", "prompt", "expect"),
  "reset": ("op", "expect"),
}
EXPECT = {
  "allocate": ("hit_blocks", "cached_tokens", "new_blocks", "free_after"),
  "free": ("free_queue", "free_after"),
  "lookup": ("hit_blocks", "cached_tokens"),
}
_LENGTHS = (
  (r"num_tokens=(\d+)", lambda m: int(m[1])),
  (r"^(\d+) tokens", lambda m: int(m[1])),
  (r"^(?:tokens )?(\d+)\.\.(\d+)\b", lambda m: int(m[2]) - int(m[1]) + 1),
  (r"^(\d+) x tok\d+$", lambda m: int(m[1])),
)
_COMMON = 48  # tokens of the prompt called "common"
_OPEN = 1 << 20  # from here on, tokens that a description leaves open

_allocate = jax.jit(cache.allocate, static_argnames="size")
_release = jax.jit(cache.release)
_lookup, _acquire, _publish = map(jax.jit, (prefix.lookup, prefix.acquire, prefix.publish))
_reset = jax.jit(prefix.reset)


def prompt_length(text: str) -> int:
  """Tokens of a prompt described in words, such as "10 tokens 0..9" or "160 x tok99"."""
  for pattern, length in _LENGTHS:
    if match := re.search(pattern, text):
      return length(match)
  if match := re.search(r"^common \+ (\d+)", text):
    return _COMMON + int(match[1])
  raise Unsupported(f"prompt not understood: {text}")


def prompt_tokens(text: str, number: int) -> list[int]:
  """A prompt described in words; `number` makes what is left open different for each prompt."""
  length, rest = prompt_length(text), _OPEN * (1 + number)
  if text.startswith("common"):
    tail = re.search(r"x tok(\d+)", text)
    token = rest if tail is None else _OPEN // 2 + int(tail[1])
    return [i // 16 for i in range(_COMMON)] + [token] * (length - _COMMON)
  if match := re.search(r"(\d+)\.\.(\d+)", text):
    return list(range(int(match[1]), int(match[1]) + length))
  if match := re.search(r"x tok(\d+)$", text):
    return [_OPEN // 2 + int(match[1])] * length
  return [rest + i for i in range(length)]


def run(scenario: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
  """Compares pages handed out, hits, refusals, and the order of the free pages.

  Raises:
    Differs: at the first field that is not equal.
    Unsupported: see `outcome`.
  """
  del defaults  # every KV scenario names its own
  known_fields(scenario, SCENARIO, {}, "scenario")
  config, ops = scenario["config"], scenario["ops"]
  known_fields(config, CONFIG, {}, "config")
  if config.get("drop_last_hit_block"):
    raise Unsupported("hits that leave out a page more, for drafters (drop_last_hit_block)")
  for number, op in enumerate(ops):
    _check_op(number, op)
  pool = (_PrefixPool if config.get("prefix_caching") else _Pool)(config)
  for number, op in enumerate(ops):
    where = f"operation {number} {op['op']}"
    if not hasattr(pool, op["op"]):
      raise Unsupported(f"{op['op']} without a prefix cache (operation {number})")
    seen = getattr(pool, op["op"])(op)
    try:
      _compare(where, seen, op.get("expect", {}))
    except Differs as difference:
      if pool.took_over:
        raise Unsupported(f"deliberate: one page per content ({difference})") from difference
      raise


def _check_op(number: int, op: Mapping[str, Any]) -> None:
  if op["op"] not in OP_FIELDS:
    raise Unsupported(f"unknown operation {op['op']}")
  known_fields(op, OP_FIELDS[op["op"]], {}, f"operation {number}")
  if op["op"] in EXPECT:
    known_fields(op.get("expect", {}), EXPECT[op["op"]], {}, f"operation {number} expect")


def _compare(where: str, seen: Any, expected: Any) -> None:
  if not isinstance(expected, Mapping):
    return equal(where, seen, expected)
  for field, value in expected.items():
    equal(f"{where} {field}", seen[field], value)


class _Pool:
  """A page pool and who holds what; the caller of `jaxserve.cache` checks that pages suffice."""

  def __init__(self, config: Mapping[str, Any]):
    self.page_size = config["block_size"]
    self.usable = config.get("usable_blocks", config["num_blocks"] - 1)
    self.max_model_len = config.get("max_model_len", self.usable * self.page_size)
    self.pool: Any = self.create()
    self.held: dict[str, list[int]] = {}
    self.computed: dict[str, int] = {}
    self.took_over = False  # a page lost its content to another one

  def create(self) -> Any:
    return cache.create(self.usable)

  def _pages(self, tokens: int) -> int:
    return -(-min(tokens, self.max_model_len) // self.page_size)

  def begin(self, op: Mapping[str, Any]) -> tuple[list[int], int]:
    """Pages that a request begins with, and how many of them were free."""
    del op
    return [], 0

  def allocate(self, op: Mapping[str, Any]) -> dict[str, Any]:
    name, text = str(op["id"]), op.get("prompt", "")
    hits, unheld = ([], 0) if name in self.held else self.begin(op)
    held = self.held.get(name, hits)
    if match := re.search(r"num_computed=(\d+)", text):
      self.computed[name] = int(match[1])
    total = self.computed.get(name, len(hits) * self.page_size) + op["new_tokens"]
    demand = max(self._pages(total + op.get("lookahead", 0)) - len(held), 0)
    free, gate = int(self.pool.num_free), demand + unheld
    if op.get("full_prompt_must_fit"):
      gate = max(gate, self._pages(prompt_length(text)) - len(held) + unheld)
    if gate > free:
      return self._seen(hits, None)
    self.take(hits)
    self.pool, ids = _allocate(self.pool, np.int32(demand), size=self.usable)
    new = [int(page) for page in ids[:demand]]
    self.held[name], self.computed[name] = held + new, total
    self.fill(name)
    return self._seen(hits, new)

  def take(self, hits: list[int]) -> None:
    """Holds pages that were hit."""

  def fill(self, name: str) -> None:
    """Notes what a request has computed by now."""

  def _seen(self, hits: list[int], new: list[int] | None) -> dict[str, Any]:
    return {
      "hit_blocks": [page + 1 for page in hits],
      "cached_tokens": len(hits) * self.page_size,
      "new_blocks": None if new is None else [page + 1 for page in new],
      "free_after": int(self.pool.num_free),
    }

  def free(self, op: Mapping[str, Any]) -> dict[str, Any]:
    name = str(op["id"])
    pages = self.given_back(self.held.pop(name))
    self.computed.pop(name, None)
    self.pool = _release(self.pool, self.padded(pages), np.int32(len(pages)))
    queue = self.free_queue()
    return {"free_queue": [page + 1 for page in queue], "free_after": len(queue)}

  def given_back(self, pages: list[int]) -> list[int]:
    return pages[::-1]

  def free_queue(self) -> list[int]:
    stack = np.asarray(self.pool.free_pages)[: int(self.pool.num_free)]
    return [int(page) for page in stack[::-1]]

  def padded(self, pages: list[int]) -> np.ndarray:
    ids = np.zeros(self.usable, np.int32)
    ids[: len(pages)] = pages
    return ids


class _PrefixPool(_Pool):
  """The same with digests; a request registers its full pages when it gets them, as there."""

  def __init__(self, config: Mapping[str, Any]):
    super().__init__(config)
    self.tokens: dict[str, list[int]] = {}
    self.roots: dict[str, bytes] = {}
    self.published: dict[str, int] = {}
    self.first: list[int] = []

  def create(self) -> Any:
    return prefix.create(self.usable)

  def _digests(self, tokens: list[int], text: str) -> np.ndarray:
    salt = re.search(r"\bsalt\w+", text)
    root = cache.root_digest(b"", salt and salt[0])
    return cache.page_digests(tokens, self.page_size, root)

  def _find(self, tokens: list[int], text: str) -> list[int]:
    digests = self._digests(tokens, text)
    count = (len(tokens) - 1) // self.page_size
    table = np.zeros((max(self.usable, count), 4), np.uint32)
    table[: len(digests)] = digests[: len(table)]
    ids, length = _lookup(self.pool, table, np.int32(count))
    return [int(page) for page in ids[: int(length)]]

  def begin(self, op: Mapping[str, Any]) -> tuple[list[int], int]:
    name, text = str(op["id"]), op.get("prompt", "")
    described = not text.startswith("same request")
    tokens = prompt_tokens(text, len(self.tokens)) if described else []
    self.tokens[name], self.first = tokens, self.first or tokens
    digests = self._digests(tokens, text)
    self.roots[name] = digests
    hits = [] if "prompt_logprobs" in text else self._find(tokens, text)
    self.published[name] = len(hits)
    refs = np.asarray(self.pool.refs)
    return hits, sum(int(refs[page] == 0) for page in hits)

  def take(self, hits: list[int]) -> None:
    self.pool = _acquire(self.pool, self.padded(hits), np.int32(len(hits)))

  def fill(self, name: str) -> None:
    digests, done = self.roots[name], self.published[name]
    full = min(self.computed[name] // self.page_size, len(digests))
    before = np.asarray(self.pool.digests)
    for page in range(done, full):
      self.took_over |= bool((before == digests[page][None]).all(axis=1).any())
      self.pool = _publish(
        self.pool, np.int32([self.held[name][page]]), digests[page : page + 1], np.int32(1)
      )
    self.published[name] = max(done, full)

  def given_back(self, pages: list[int]) -> list[int]:
    return pages

  def lookup(self, op: Mapping[str, Any]) -> dict[str, Any]:
    text = op["prompt"]
    if re.fullmatch(r"\d+ x tok\d+", text):
      length = prompt_length(text)
      tokens = self.first[:length] + [_OPEN] * (length - len(self.first))
    else:
      tokens = prompt_tokens(text, len(self.tokens))
    hits = self._find(tokens, text)
    return {
      "hit_blocks": [page + 1 for page in hits], "cached_tokens": len(hits) * self.page_size
    }  # fmt: skip

  def reset(self, op: Mapping[str, Any]) -> bool:
    del op
    all_free = int(self.pool.num_free) == self.usable
    if all_free:
      self.pool = _reset(self.pool)
    return all_free

  def free_queue(self) -> list[int]:
    pool = jax.tree.map(np.asarray, self.pool)
    stack = pool.empty[: pool.num_empty][::-1].tolist()
    entries = [(at, page) for at, page in enumerate(pool.log[: pool.tail]) if at >= pool.head]
    return stack + [
      int(page)
      for at, page in entries
      if pool.cell[page] == at and not pool.refs[page] and pool.digests[page, 0]
    ]
