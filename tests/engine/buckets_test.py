"""Bucket tables: coverage, waste, and the last bucket being the budget itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.config import bucket_for, row_buckets, token_buckets


def test_few_small_ones_a_coarse_grid_and_eighths_below_the_budget():
  assert token_buckets(2048) == (
    1, 4, 8, 12, 16, 24, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048,
  )  # fmt: skip
  assert token_buckets(512)[-6:] == (192, 256, 320, 384, 448, 512)


def test_a_budget_between_buckets_is_the_last_one():
  assert token_buckets(317)[-3:] == (192, 256, 317)
  assert token_buckets(1000, 1536)[-4:] == (1000, 1152, 1344, 1536)


def test_budgets_that_are_only_compared_with_get_no_finer_steps():
  table = token_buckets(2048, others=(8192, 3000))
  assert table[:-5] == token_buckets(2048)
  assert table[-5:] == (3000, 3072, 4096, 6144, 8192)


def test_the_padding_of_steps_near_the_budget_is_an_eighth_of_it_at_most():
  for budget in (512, 1536, 2048, 8192):
    buckets = token_buckets(budget)
    for count in range(budget // 2, budget + 1):
      assert bucket_for(count, buckets) - count < budget / 8


@given(st.integers(1, 20000), st.data())
def test_every_count_has_a_bucket_with_bounded_waste(budget, data):
  buckets = token_buckets(budget)
  assert buckets[-1] == budget and list(buckets) == sorted(set(buckets))
  count = data.draw(st.integers(1, budget))
  bucket = bucket_for(count, buckets)
  assert count <= bucket
  if count > 64:
    assert bucket <= 1.5 * count


@given(st.integers(1, 3000))
def test_row_buckets_end_at_the_seats(seats):
  rows = row_buckets(seats)
  assert rows[-1] == seats and list(rows) == sorted(set(rows))


def test_no_bucket_is_an_error_with_numbers():
  with pytest.raises(ValueError, match="size=9.*largest is 8"):
    bucket_for(9, (4, 8))
