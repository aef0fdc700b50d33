"""A toy engine that makes run records: decodes first, then prompts in order, fixed costs."""

from jaxserve.replay import records

SHORT = tuple((f"chat-{i}", 0.4 * i, 60 + 7 * i, 70 - 3 * i) for i in range(8))
LONG = ("long", 3.1, 4096, 24)
LATE = tuple((f"late-{i}", 4.0 + 0.7 * i, 90, 30) for i in range(3))


def step_seconds(tokens, prefix):
  return 0.030 + 6e-4 * tokens + 3e-8 * tokens * prefix


def _grant(need, left, chunked):
  return min(need, left) if chunked or need <= left else 0


def make_run(name, budget, chunked=True, specs=(*SHORT, LONG, *LATE), zero=100.0):
  now, steps, done = zero, [], {spec[0]: 0 for spec in specs}
  tokens = {spec[0]: [] for spec in specs}
  prompt, output = ({spec[0]: spec[i] for spec in specs} for i in (2, 3))
  while any(len(tokens[name]) < output[name] for name in tokens):
    here = [s[0] for s in specs if zero + s[1] <= now and len(tokens[s[0]]) < output[s[0]]]
    if not here:
      now += 0.01
      continue
    left, rows = budget, []
    for kind in ("decode", "prefill"):
      for one in here:
        if (done[one] < prompt[one]) == (kind == "prefill"):
          got = _grant(max(prompt[one] - done[one], 1), left, chunked)
          left -= got
          rows += [(one, got, kind)] if got else []
    used = budget - left
    bucket = min(budget, 1 << (used - 1).bit_length())
    end = now + step_seconds(bucket, max(done[one] for one, _, _ in rows))
    for one, got, _ in rows:
      done[one] += got
      if done[one] >= prompt[one]:
        tokens[one].append(end)
    entries = [records.StepRequest(id=one, tokens=got, kind=kind) for one, got, kind in rows]
    steps.append(
      records.StepRecord(
        step=len(steps), start_s=now, end_s=end, budget=budget, bucket=bucket,
        num_tokens=used, requests=entries,
      )
    )  # fmt: skip
    now = end
  requests = [
    records.RequestTrace(
      id=one, arrival_s=zero + at, token_times_s=tuple(tokens[one]), num_prompt=size,
      finish_reason="length", is_long_prompt=one == "long",
    )
    for one, at, size, _ in specs
  ]  # fmt: skip
  return records.RunRecord(
    name=name, policy="fcfs", budget=budget, chunked_prefill=chunked, steps=steps, requests=requests
  )  # fmt: skip


def both_runs():
  return make_run("chunked, budget 256", 256), make_run("unchunked, budget 8192", 8192, False)
