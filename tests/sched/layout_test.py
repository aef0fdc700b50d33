"""Step plans against a plain walk over the scheduled requests, and all padding rules."""

import jax
import numpy as np
import pytest

from jaxserve import sched
from jaxserve.config import PlanShape
from jaxserve.types import cut_plan, pack_plan, plan_parts, unpack_plan
from jaxserve.types.plan import packed_size
from tests.sched.life_test import random_life, random_params
from tests.testing.scheduling import host, small_config

CONFIG = small_config(num_pages=29)


def plans(bucket, tile, steps=60):
  """(state, decision, plan) of the steps of a random life that fit the bucket."""
  shape = PlanShape.of(CONFIG, num_tokens=bucket, query_tile=tile)
  lay_out = jax.jit(lambda s, d: sched.lay_out(s, d, shape))
  rng = np.random.default_rng(3)
  params = random_params(rng)
  twins = random_life(rng, CONFIG, params, steps=20)
  for _ in range(steps):
    twins.submit(int(np.random.default_rng(twins.oracle.submitted).integers(1, 30)), 31)
    decision, _ = twins.schedule(params)
    twins.commit()
    while twins.in_flight:
      twins.commit()
    if 0 < decision.num_tokens <= bucket:
      # commit does not touch what lay_out reads of requests still alive; rebuild from the decision
      yield shape, host(twins.state), decision, host(lay_out(twins.state, decision))


@pytest.mark.parametrize("bucket, tile", [(17, 5), (17, 512), (11, 2)])
def test_plan_equals_walk(bucket, tile):
  seen = 0
  for shape, state, decision, plan in plans(bucket, tile):
    page_size, at, work = CONFIG.cache.page_size, 0, []
    for row, request in enumerate(decision.order[: decision.num_scheduled]):
      start, count = int(decision.start[request]), int(decision.tokens[request])
      assert plan.row_request[row] == request
      assert plan.query_start_loc[row] == at and plan.seq_lens[row] == start + count
      assert plan.logits_idx[row] == at + count - 1
      assert plan.sample_mask[row] == decision.samples[request]
      table = state.block_tables[request]
      used = -(-(start + count) // page_size)
      np.testing.assert_array_equal(plan.block_tables[row, :used], table[:used])
      assert (plan.block_tables[row, used:] == 0).all()
      for i in range(count):
        position = start + i
        assert plan.token_rows[at + i] == row and plan.positions[at + i] == position
        slot = table[position // page_size] * page_size + position % page_size
        assert plan.slot_mapping[at + i] == slot
      is_decode = count == 1 and start >= state.num_prompt[request]
      for offset in range(0, count, tile):
        size = min(tile, count - offset)
        item = (row, at + offset, size, start + offset, 0, start + offset + size, 0, 1)
        work.append((not is_decode, *item))
      at += count
      seen += 1
    check_padding(shape, decision, plan)
    expected = [item[1:] for item in sorted(work, key=lambda item: item[0])]
    assert plan.num_work.tolist() == [sum(not w[0] for w in work), len(work)]
    assert [tuple(w) for w in plan.work[: len(work)].tolist()] == expected
    assert (plan.work[len(work) :] == 0).all()
  assert seen > 50


def check_padding(shape, decision, plan):
  rows, tokens = int(decision.num_scheduled), int(decision.num_tokens)
  assert (plan.num_rows, plan.num_tokens) == (rows, tokens)
  assert (plan.row_request[rows:] == shape.max_requests).all()
  assert (plan.query_start_loc[rows:] == tokens).all()
  assert (plan.seq_lens[rows:] == 0).all() and (plan.sample_mask[rows:] == 0).all()
  assert (plan.token_rows[tokens:] == shape.num_rows).all()
  assert (plan.positions[tokens:] == 0).all()
  pad = np.arange(tokens, shape.num_tokens)
  np.testing.assert_array_equal(plan.slot_mapping[tokens:], shape.cache.num_slots + pad)
  assert len(set(plan.slot_mapping.tolist())) == shape.num_tokens


def test_pack_and_unpack_are_inverse():
  shape, _, _, plan = next(plans(17, 5))
  packed = pack_plan(plan)
  assert packed.shape == (packed_size(shape),) and packed.dtype == np.int32
  for name, value in vars(unpack_plan(packed, shape)).items():
    np.testing.assert_array_equal(value, getattr(plan, name), err_msg=name)


def test_work_capacity_covers_the_worst_case():
  """Every row a partial tile: two queries each, or one tile and one query over."""
  for bucket, tile in ((17, 5), (5, 1), (16, 2), (17, 17)):
    shape = PlanShape.of(CONFIG, num_tokens=bucket, query_tile=tile)
    worst = 0
    for rows in range(1, CONFIG.max_num_seqs + 1):
      for extra in range(bucket - rows + 1):
        counts = [1 + extra // rows + (i < extra % rows) for i in range(rows)]
        worst = max(worst, sum(-(-c // shape.query_tile) for c in counts))
    assert worst <= shape.num_work_items


@pytest.mark.parametrize("bucket, tile", [(11, 5), (11, 512), (7, 512), (16, 5)])
def test_a_plan_cut_to_its_bucket_is_the_plan_laid_out_for_it(bucket, tile):
  small = PlanShape.of(CONFIG, num_tokens=bucket, query_tile=tile)
  lay_out = jax.jit(lambda s, d: pack_plan(sched.lay_out(s, d, small)))
  seen = 0
  for large, state, decision, plan in plans(17, tile):
    if decision.num_tokens <= bucket:
      cut = cut_plan(np.asarray(pack_plan(plan)), plan_parts(large, small))
      np.testing.assert_array_equal(cut, lay_out(state, decision))
      seen += 1
  assert seen > 10
