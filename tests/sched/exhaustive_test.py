"""Every reachable state of a small scheduler, for every policy; planted faults are found."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.exhaustive import config as configured
from experiments.exhaustive import laws, plot, run
from experiments.exhaustive.canonical import canonical
from experiments.exhaustive.config import Setting
from experiments.exhaustive.model import Functions, stepped, submitted
from experiments.exhaustive.search import search
from experiments.store import Store
from jaxserve import sched
from jaxserve.pytree import unpack
from jaxserve.sched.policy import stateless
from jaxserve.sched.rules import admit, fit_pages, replace, running, serve
from jaxserve.types import Status
from tests.testing.scheduling import check_pages, host

pytestmark = pytest.mark.one_leg

TINY = Setting(policy="vllm_v1", pages=2, budget=2)


@functools.lru_cache(maxsize=1)  # not more: a search keeps all of its states
def found(setting):
  return search(setting.model(), setting.params())


@pytest.mark.parametrize("policy", sched.POLICIES)
def test_every_law_holds_in_every_state_and_every_state_drains(policy):
  seen = found(Setting(policy=policy, pages=2, budget=3))
  assert seen.violation is None, seen.violation.words()
  assert seen.states > 300 and seen.transitions > 4 * seen.states
  assert 0 < seen.longest_drain < 20
  idles = "idle_steps" in sched.POLICIES[policy].exceptions
  assert seen.longest_idle == 0 or idles


def test_states_are_those_that_were_counted():
  """Another number means that the default policy does something else, or that states are missed."""
  seen = found(Setting(policy="vllm_v1", pages=2, budget=3))
  assert (seen.states, seen.transitions, seen.depth) == (475, 3004, 8)


def leaking(state, requests):
  """An abort that forgets a page where it had two."""
  new = sched.abort(state, requests)
  lost = jnp.any(requests & (state.num_pages > 1)).astype(jnp.int32)
  pool = dataclasses.replace(new.pool, num_free=new.pool.num_free - lost)
  return dataclasses.replace(new, pool=pool)


def twice(state, requests):
  """An abort that gives back a page that somebody else has."""
  new = sched.abort(state, requests)
  other = (new.status == Status.RUNNING) & (new.num_pages > 0)
  page = new.block_tables[jnp.argmax(other), 0]
  top = jnp.where(jnp.any(other) & jnp.any(requests), page, new.pool.free_pages[0])
  pool = dataclasses.replace(new.pool, free_pages=new.pool.free_pages.at[0].set(top))
  return dataclasses.replace(new, pool=pool)


def generous(state, params, config):
  """A scheduler that spends a token more than the budget, once three requests are there."""
  many = jnp.sum(state.status != Status.FREE) == 3
  budget = params.budget + many.astype(jnp.int32)
  return sched.schedule(state, dataclasses.replace(params, budget=budget), config)


def starving(state, params, config):
  """A scheduler that does nothing while the oldest request has a prompt of three tokens."""
  stuck = (state.queue[0] < 3) & (state.num_prompt[jnp.minimum(state.queue[0], 2)] == 3)
  seats = jnp.where(stuck, 0, params.max_num_seqs)
  new, decision = sched.schedule(state, dataclasses.replace(params, max_num_seqs=seats), config)
  return new, decision


def forgetful(state, params, config):
  """A scheduler that does not count the last token of a chunk."""
  new, decision = sched.schedule(state, params, config)
  less = (decision.tokens > 1).astype(jnp.int32)
  return dataclasses.replace(new, num_computed=new.num_computed - less), decision


def stopless(state, decision, stopped):
  """A commit that does not end requests by length."""
  longer = dataclasses.replace(state, max_total=state.max_total + 1)
  new, finished = sched.commit(longer, decision, stopped)
  return dataclasses.replace(new, max_total=state.max_total), finished


def shuffled(state, num_prompt, max_total, **options):
  """A submit that puts a newcomer in front."""
  new, slot = sched.submit(state, num_prompt, max_total, **options)
  count = jnp.sum(new.status != Status.FREE)
  lane = jnp.arange(new.queue.shape[0])
  front = jnp.where(lane == 0, slot, jnp.roll(new.queue, 1))
  return dataclasses.replace(new, queue=jnp.where(lane < count, front, new.queue)), slot


FAULTS = [
  (dict(abort=leaking), "pages", ("submit 3+2", "step", "step", "abort slot 0")),
  (dict(schedule=generous), "budget", 4),
  (dict(schedule=starving), "acts", ("submit 3+2", "step")),
  (dict(abort=twice), "pages", 5),
  (dict(schedule=forgetful), "start", 2),
  (dict(commit=stopless), "ended", ("submit 2+1", "step")),
  (dict(submit=shuffled), "order", ("submit 1+2", "submit 1+2")),
]


def quick_first(faults, number):
  """Each compiles a scheduler of its own."""
  slow = [pytest.param(*fault, marks=pytest.mark.slow) for fault in faults[number:]]
  return [*faults[:number], *slow]


@pytest.mark.parametrize(("fault", "law", "trace"), quick_first(FAULTS, 3))
def test_a_planted_fault_is_found_with_a_shortest_trace(fault, law, trace):
  model = TINY.model(Functions(**fault))
  violation = search(model, TINY.params()).violation
  assert violation is not None and violation.law == law, violation
  assert violation.trace == trace or len(violation.trace) == trace


def never_whole(draft, context):
  """Forgets about prompts of three tokens while nothing runs."""
  return replace(draft, need=jnp.where(jnp.any(draft.running) | (draft.need < 3), draft.need, 0))


def give_up_when_full(draft, context):
  """Preempts everybody when no page is free."""
  out = draft.running & (draft.free == 0)
  return replace(draft, preempted=out, tokens=jnp.where(out, 0, draft.tokens))


def policy_of(*rules, exceptions=()):
  return sched.Policy(
    rule=sched.chain(*rules), formula="", source="this test", exceptions=frozenset(exceptions)
  )


STUCK = {
  "deadlock": policy_of(
    stateless(never_whole), serve(running), fit_pages(), admit(), exceptions=["idle_steps"]
  ),
  "livelock": policy_of(serve(running), stateless(give_up_when_full), admit(pages="prompt")),
}


@pytest.mark.parametrize("law", STUCK)
def test_a_policy_that_never_ends_a_request_is_found(law):
  violation = found(dataclasses.replace(TINY, policy=STUCK[law])).violation
  assert violation is not None and violation.law == law, violation
  assert violation.trace[0] == "submit 3+2" and set(violation.loop) == {"step"}
  assert "then for ever: step" in violation.words()


LIVES = {
  "overlap": Setting(policy="vllm_v1", pages=3, budget=3, overlap=True),
  "prefix": Setting(policy="vllm_v1", pages=3, budget=3, overlap=True, prefix_cache=True),
  "sglang": Setting(policy="sglang", pages=3, budget=3, overlap=True, variant="careless"),
}


@pytest.mark.parametrize(
  "name", ["overlap", *(pytest.param(n, marks=pytest.mark.slow) for n in ("prefix", "sglang"))]
)
def test_a_state_under_its_one_name_lives_on_as_the_state_itself(name):
  """What a search forgets about a state is never read again."""
  setting, rng = LIVES[name], np.random.default_rng(3)
  model, params = setting.model(), setting.params()
  submit = jax.jit(lambda node, kind, text: submitted(node, kind, text, model))
  step = jax.jit(lambda node: stepped(node, params, model))
  abort = jax.jit(lambda node, who: dataclasses.replace(node, state=sched.abort(node.state, who)))
  rename = jax.jit(canonical)
  raw = named = model.first()
  for _ in range(400):
    kind, event = int(rng.integers(len(model.kinds))), rng.random()
    if event < 0.3 and (host(raw.state.status) == Status.FREE).any():
      raw, named = (submit(n, model.numbers[kind], model.texts[kind]) for n in (raw, named))
    elif event < 0.35:
      who = np.arange(setting.rows) == rng.integers(setting.rows)
      raw, named = abort(raw, who), abort(named, who)
    else:
      (raws, live, _, decision), (nameds, _, _, same) = step(raw), step(named)
      check_same(decision, same)
      stops = int(rng.choice([i for i, s in enumerate(model.stops) if not (s & ~live).any()]))
      raw, named = jax.tree.map(lambda x, i=stops: x[i], host((raws, nameds)))
    named = rename(named)
    jax.tree.map(np.testing.assert_array_equal, rename(raw), named)


def check_same(decision, same):
  """But for submit numbers, a count, and where free slots are."""
  decision, same = host(decision), host(same)
  served = decision.tokens > 0
  for field in dataclasses.fields(decision):
    one, other = getattr(decision, field.name), getattr(same, field.name)
    if field.name == "start":
      one, other = one * served, other * served
    if field.name not in {"arrival", "evicted"}:
      np.testing.assert_array_equal(one, other, err_msg=field.name)


def nodes_of(setting):
  """Every state of a search, unpacked."""
  model = setting.model()
  like = jax.eval_shape(model.first)
  return [host(unpack(row, like)) for row in found(setting).rows], model


def accepts(check, *arguments):
  try:
    check(*arguments)
  except (AssertionError, IndexError):
    return False
  return True


def test_the_law_of_pages_is_that_of_the_random_lives():
  """On states that were searched, and on the same with one number changed."""
  nodes, model = nodes_of(TINY)
  verdict = jax.jit(lambda node: laws.of_state(node, TINY.params(), model.config)["pages"])
  rng, seen = np.random.default_rng(0), []
  for i in rng.choice(len(nodes), 200):
    state = jax.tree.map(np.array, nodes[i].state)
    if rng.random() < 0.7:
      field = (state.num_pages, state.pool.free_pages, state.block_tables)[rng.integers(3)]
      live = state.status[:, None] if field is state.block_tables else state.status
      if field is state.pool.free_pages or live.any():
        field[tuple(rng.integers(n) for n in field.shape)] = rng.integers(2)
    expected = accepts(check_pages, model.config, state)
    assert bool(verdict(dataclasses.replace(nodes[i], state=state))) == expected
    seen.append(expected)
  assert 20 < sum(seen) < 180


def test_the_experiment_prints_a_row_for_every_budget_and_tells_of_violations(
  tmp_path, monkeypatch
):
  config = configured.Config(policies=("static",), pages=(2,), budgets=(1, 3), variants=False)
  monkeypatch.setattr(
    configured.Config, "_kinds_of_search", lambda self: [{"policy": "static"}], raising=True
  )
  rows = run.run(config, Store(tmp_path))
  page = plot.page(config, rows)
  assert [row["budget"] for row in rows] == [1, 3] and "0 searches with" in page.findings[0]
  broken = [rows[0] | {"violation": "pages: submit 1+2"}, rows[1]]
  assert "1 searches with" in plot.page(config, broken).findings[0]
  with pytest.raises(ValueError, match=r"budgets=\(5,\): must be in \[1, 4\]"):
    configured.Config(budgets=(5,))
  with pytest.raises(ValueError, match="most_states=10: there are more"):
    search(TINY.model(), TINY.params(), most_states=10)
