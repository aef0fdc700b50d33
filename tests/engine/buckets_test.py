"""Bucket tables: coverage, waste, and the last bucket being the budget itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.config import bucket_for, row_buckets, token_buckets


def test_small_buckets_double_then_alternate():
  assert token_buckets(512) == (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)


def test_a_budget_between_buckets_is_the_last_one():
  assert token_buckets(317)[-3:] == (192, 256, 317)
  assert token_buckets(1000, 1536)[-4:] == (768, 1000, 1024, 1536)


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
