"""vLLM KV operation lists on `jaxserve.cache`, where they need no prefix cache.

Pages are given back tail first, as vLLM does. Page ids start at 1 there and at 0 here.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from experiments.vectors.outcome import Unsupported, equal, known_fields
from jaxserve import cache

SCENARIO = ("name", "source", "kind", "note", "config", "ops")
CONFIG = ("block_size", "num_blocks", "usable_blocks", "prefix_caching", "max_model_len")
OP_FIELDS = {
  "allocate": ("op", "id", "prompt", "new_tokens", "lookahead", "expect", "full_prompt_must_fit"),
  "free": ("op", "id", "expect"),
}
EXPECT = {
  "allocate": ("hit_blocks", "cached_tokens", "new_blocks", "free_after"),
  "free": ("free_queue", "free_after"),
}
_LENGTHS = (
  (r"num_tokens=(\d+)", lambda m: int(m[1])),
  (r"^(\d+) tokens", lambda m: int(m[1])),
  (r"^(?:tokens )?(\d+)\.\.(\d+)$", lambda m: int(m[2]) - int(m[1]) + 1),
  (r"^(\d+) x tok\d+$", lambda m: int(m[1])),
)

_allocate = jax.jit(cache.allocate, static_argnames="size")
_release = jax.jit(cache.release)


def prompt_length(text: str) -> int:
  """Tokens of a prompt described in words, such as "10 tokens 0..9" or "160 x tok99"."""
  for pattern, length in _LENGTHS:
    if match := re.search(pattern, text):
      return length(match)
  raise Unsupported(f"prompt not understood: {text}")


def run(scenario: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
  """Compares pages handed out, refusals, and the order of the free pages.

  Raises:
    Differs: at the first field that is not equal.
    Unsupported: see `outcome`.
  """
  del defaults  # every KV scenario names its own
  known_fields(scenario, SCENARIO, {}, "scenario")
  config, ops = scenario["config"], scenario["ops"]
  known_fields(config, CONFIG, {"drop_last_hit_block": "prefix cache"}, "config")
  _refuse_prefix_cache(config, ops)
  for number, op in enumerate(ops):
    if op["op"] not in OP_FIELDS:
      raise Unsupported(f"unknown operation {op['op']}")
    known_fields(op, OP_FIELDS[op["op"]], {}, f"operation {number}")
    known_fields(op.get("expect", {}), EXPECT[op["op"]], {}, f"operation {number} expect")
  pool = _Pool(config)
  for number, op in enumerate(ops):
    seen = pool.allocate(op) if op["op"] == "allocate" else pool.free(op)
    for field, expected in op.get("expect", {}).items():
      equal(f"operation {number} {op['op']} {field}", seen[field], expected)


def _refuse_prefix_cache(config: Mapping[str, Any], ops: list[Mapping[str, Any]]) -> None:
  if not config.get("prefix_caching"):
    return
  for op in ops:
    expect = op.get("expect") or {}
    hits = op["op"] == "allocate" and (expect.get("hit_blocks") or expect.get("cached_tokens"))
    if op["op"] != "allocate" or hits:
      raise Unsupported(f"prefix cache (operation {op['op']})")


class _Pool:
  """A page pool and who holds what; the caller of `jaxserve.cache` checks that pages suffice."""

  def __init__(self, config: Mapping[str, Any]):
    self.page_size = config["block_size"]
    self.usable = config.get("usable_blocks", config["num_blocks"] - 1)
    self.max_model_len = config.get("max_model_len", self.usable * self.page_size)
    self.pool = cache.create(self.usable)
    self.held: dict[str, list[int]] = {}
    self.computed: dict[str, int] = {}

  def _pages(self, tokens: int) -> int:
    return -(-min(tokens, self.max_model_len) // self.page_size)

  def allocate(self, op: Mapping[str, Any]) -> dict[str, Any]:
    name, text = str(op["id"]), op.get("prompt", "")
    held = self.held.setdefault(name, [])
    if match := re.search(r"num_computed=(\d+)", text):
      self.computed[name] = int(match[1])
    total = self.computed.get(name, 0) + op["new_tokens"]
    demand = max(self._pages(total + op.get("lookahead", 0)) - len(held), 0)
    free, gate = int(self.pool.num_free), demand
    if op.get("full_prompt_must_fit"):
      gate = max(demand, self._pages(prompt_length(text)) - len(held))
    if gate > free:
      return self._seen(None)
    self.pool, ids = _allocate(self.pool, np.int32(demand), size=self.usable)
    new = [int(page) for page in ids[:demand]]
    held += new
    self.computed[name] = total
    return self._seen([page + 1 for page in new])

  def _seen(self, new_blocks: list[int] | None) -> dict[str, Any]:
    free = int(self.pool.num_free)
    return {"hit_blocks": [], "cached_tokens": 0, "new_blocks": new_blocks, "free_after": free}

  def free(self, op: Mapping[str, Any]) -> dict[str, Any]:
    pages = self.held.pop(str(op["id"]))[::-1]
    self.computed.pop(str(op["id"]), None)
    ids = np.zeros(self.usable, np.int32)
    ids[: len(pages)] = pages
    self.pool = _release(self.pool, ids, np.int32(len(pages)))
    stack = np.asarray(self.pool.free_pages)[: int(self.pool.num_free)]
    return {"free_queue": [int(p) + 1 for p in stack[::-1]], "free_after": len(stack)}
