"""Work lists with split decodes, against the rules written out one item after another."""

import dataclasses
import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings

from jaxserve import sched
from jaxserve.config import CacheConfig, PlanShape, SchedulerConfig, SplitKV, TargetDescription
from jaxserve.sched import split_kv
from jaxserve.types import Decision, cut_plan, pack_plan, plan_parts, unpack_plan

LONGEST = 131_072
H200 = TargetDescription(num_sms=132)
# (splits, rows, tokens, query tile, longest context)
TARGETS = {
  "tiny": (SplitKV(capacity=3, tile=2, min_keys=4), 7, 23, 5, 61),
  "one": (SplitKV(capacity=1), 5, 11, 4, 1021),
  "hopper_8_kv_heads": (SplitKV.of(H200, num_kv_heads=8), 13, 37, 16, LONGEST),
  "hopper_1_kv_head": (SplitKV.of(H200, num_kv_heads=1), 11, 19, 19, LONGEST),
}


@dataclasses.dataclass(frozen=True)
class Part:
  """What a row gets: `tokens` after `start` others, the first `prompt` of all are the prompt's."""

  tokens: int
  start: int
  prompt: int

  @property
  def is_decode(self):
    return self.tokens == 1 and self.start >= self.prompt


def config_of(name):
  _, rows, tokens, _, longest = TARGETS[name]
  cache = CacheConfig(num_pages=3, page_size=-(-longest // 5))
  return SchedulerConfig(
    cache=cache, max_num_seqs=rows, max_requests=rows + 3, max_budget=tokens, max_model_len=longest
  )


@functools.cache
def compiled(name, tokens):
  """(shape, its jitted and packed `lay_out`, an empty state) of a bucket of `tokens`."""
  splits, _, _, tile, _ = TARGETS[name]
  config = config_of(name)
  shape = PlanShape.of(config, tokens, tile, splits)
  return shape, jax.jit(lambda s, d: pack_plan(sched.lay_out(s, d, shape))), sched.init(config)


def packed_plan(name, parts, tokens):
  shape, lay_out, state = compiled(name, tokens)
  size = shape.max_requests
  slots = np.random.default_rng(len(parts)).permutation(size)[: len(parts)]
  columns = {k: np.zeros(size, np.int32) for k in ("tokens", "start", "prompt")}
  for slot, part in zip(slots, parts, strict=True):
    for field, column in columns.items():
      column[slot] = getattr(part, field)
  order = np.full(shape.num_rows, size, np.int32)
  order[: len(parts)] = slots
  off, zero = np.zeros(size, bool), np.zeros(size, np.int32)
  decision = Decision(
    order=order, num_scheduled=np.int32(len(parts)),
    num_tokens=np.int32(sum(p.tokens for p in parts)), tokens=columns["tokens"],
    start=columns["start"], new_pages=zero, admitted=off, preempted=off, samples=off, arrival=zero,
  )  # fmt: skip
  state = dataclasses.replace(state, num_prompt=jnp.asarray(columns["prompt"]))
  return np.asarray(lay_out(state, jax.tree.map(jnp.asarray, decision)))


@st.composite
def cases(draw, name=None):
  name = name or draw(st.sampled_from(sorted(TARGETS)))
  _, rows, room, _, longest = TARGETS[name]
  parts, decoding = [], draw(st.sampled_from(["all", "none", "some"]))
  length = st.one_of(st.integers(1, longest), st.sampled_from([1, 2, longest - 1, longest]))
  for _ in range(draw(st.integers(0, rows))):
    total = draw(length)
    if decoding == "all" or (decoding == "some" and draw(st.booleans())):
      part = Part(1, total - 1, draw(st.integers(0, total - 1)))
    else:
      tokens = draw(st.integers(1, min(total, 9)))
      part = Part(tokens, total - tokens, total)
    if part.tokens <= room:
      room -= part.tokens
      parts.append(part)
  return name, parts


def chunk_oracle(contexts, splits):
  limit = max(splits.capacity, len(contexts) + splits.capacity // 2)
  chunk = splits.min_keys
  while sum(-(-keys // chunk) for keys in contexts) > limit:
    chunk += splits.tile
  return chunk


def work_oracle(name, parts):
  splits, _, _, tile, _ = TARGETS[name]
  chunk = chunk_oracle([p.start + 1 for p in parts if p.is_decode], splits)
  decodes, chunks, at = [], [], 0
  for row, part in enumerate(parts):
    if part.is_decode:
      count = -(-(part.start + 1) // chunk)
      for split in range(count):
        end = min((split + 1) * chunk, part.start + 1)
        decodes.append((row, at, 1, part.start, split * chunk, end, split, count))
    else:
      for offset in range(0, part.tokens, tile):
        n, first = min(tile, part.tokens - offset), part.start + offset
        chunks.append((row, at + offset, n, first, 0, first + n, 0, 1))
    at += part.tokens
  return decodes, chunks


@settings(max_examples=400)
@given(cases())
@example(("hopper_8_kv_heads", [Part(1, LONGEST - 1, 5)] * 13))
@example(("hopper_1_kv_head", [Part(1, LONGEST - 1, 5)] + [Part(1, 0, 0)] * 10))
@example(("tiny", []))
def test_work_list_equals_the_oracle_and_keeps_the_rules(case):
  name, parts = case
  splits, _, tokens, _, _ = TARGETS[name]
  shape, _, _ = compiled(name, tokens)
  plan = unpack_plan(packed_plan(name, parts, tokens), shape)
  decodes, chunks = work_oracle(name, parts)
  assert plan.num_work.tolist() == [len(decodes), len(decodes) + len(chunks)]
  work = np.asarray(plan.work)
  assert len(decodes) <= shape.num_decode_items and plan.num_work[1] <= len(work)
  np.testing.assert_array_equal(work[plan.num_work[1] :], 0)
  live = [tuple(item) for item in work[: plan.num_work[1]].tolist()]
  assert live == decodes + chunks
  check_rules(parts, live[: len(decodes)], live[len(decodes) :], splits)


def check_rules(parts, decodes, chunks, splits):
  """Every (query, key) pair once, splits in order and consecutive, and sizes within bounds."""
  starts = np.cumsum([0] + [p.tokens for p in parts])
  seen = {}
  for i, (row, query, count, position, begin, end, split, num_splits) in enumerate(decodes):
    assert parts[row].is_decode and count == 1
    assert query == starts[row] and position == parts[row].start
    assert begin < end and begin % splits.tile == 0
    assert end == position + 1 if split == num_splits - 1 else end - begin >= splits.min_keys
    before, at = seen.get(row, (0, 0))
    assert (split, begin) == (before, at)
    assert split == 0 or decodes[i - 1][0] == row
    seen[row] = (split + 1, end)
    last = i + 1 == len(decodes) or decodes[i + 1][0] != row
    assert not last or split + 1 == num_splits
  queries = [q for _, query, count, *_ in chunks for q in range(query, query + count)]
  expected = []
  for row, part in enumerate(parts):
    if part.is_decode:
      assert seen.pop(row)[1] == part.start + 1
    else:
      expected += range(starts[row], starts[row] + part.tokens)
  assert not seen and queries == expected


@settings(max_examples=100)
@given(st.data())
@pytest.mark.parametrize("name", ["tiny", "hopper_8_kv_heads"])
def test_a_plan_cut_to_its_bucket_is_the_plan_laid_out_for_it(name, data):
  tokens = TARGETS[name][2]
  _, parts = data.draw(cases(name))
  bucket = data.draw(st.sampled_from([b for b in (2, 7, 11, 16, tokens) if b <= tokens]))
  while sum(p.tokens for p in parts) > bucket:
    parts.pop()
  places = plan_parts(compiled(name, tokens)[0], compiled(name, bucket)[0])
  cut = cut_plan(packed_plan(name, parts, tokens), places)
  np.testing.assert_array_equal(cut, packed_plan(name, parts, bucket))


def test_few_decodes_fill_the_device_and_equal_ones_are_not_cut():
  splits = SplitKV.of(H200, num_kv_heads=4)
  assert splits == SplitKV(capacity=99, tile=128, min_keys=128)

  def items(*keys):
    keys = jnp.asarray(keys, jnp.int32)
    return split_kv.count_items(keys, split_kv.chunk_keys(keys, splits, LONGEST)).tolist()

  assert items(LONGEST) == [94]  # 1408 keys; 99 items would be 1324
  assert items(LONGEST, LONGEST) == [49, 49]
  assert items(1024, 0, 100) == [8, 0, 1]  # not below 128 keys
  assert items(*[1000] * 200) == [1] * 200
  long, *others = items(100_000, *[1000] * 200)  # beside many, the long one is cut
  assert long == 49 and set(others) == {1}


@pytest.mark.parametrize("kv_heads, capacity", [(1, 396), (8, 49), (999, 1)])
def test_capacity_is_three_waves_of_blocks(kv_heads, capacity):
  assert SplitKV.of(H200, kv_heads) == SplitKV(capacity=capacity)


@pytest.mark.parametrize(
  "fields", [dict(capacity=0), dict(capacity=1, tile=0), dict(capacity=1, tile=64, min_keys=96)]
)
def test_bad_splits_are_refused(fields):
  with pytest.raises(ValueError, match=r"capacity=0|tile=0|min_keys=96"):
    SplitKV(**fields)


def test_no_splits_no_extra_items():
  config = config_of("tiny")
  plain, split = (PlanShape.of(config, 23, 5, s) for s in (None, TARGETS["tiny"][0]))
  assert (plain.num_decode_items, plain.num_work_items) == (7, 11)
  assert (split.num_decode_items, split.num_work_items) == (10, 14)
