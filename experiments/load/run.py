"""Sends requests at their times, whatever comes back, and notes when tokens do."""

import asyncio
import dataclasses
import json
import time

import numpy as np

from experiments import http_client
from jaxserve import metrics, workload
from jaxserve.progress import progress

_LATE_S = 0.01  # a request sent later than this was held up by this client


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What is sent, and how it is judged.

  url: the server. model: what it calls its model; None: the first that it lists. endpoint:
  completions or chat. warm_up: requests at the beginning that do not count. slo: objectives.
  timeout_s: of a request. key: for the API. seed: of prompts.
  """

  url: str
  model: str | None = None
  endpoint: str = "completions"
  warm_up: int = 0
  slo: metrics.Slo | None = None
  timeout_s: float = 600.0
  key: str | None = None
  seed: int = 0
  ignore_eos: bool = True


@dataclasses.dataclass(kw_only=True)
class Sent:
  """One request: when it should have gone out, when it did, what came back when, in seconds."""

  due_s: float
  sent_s: float = 0.0
  token_times_s: list[float] = dataclasses.field(default_factory=list)
  num_prompt: int = 0
  finish_reason: str | None = None
  error: str = ""
  status: int = 0


def execute(config, load):
  """The requests of a workload, in order, as `Sent`."""
  return asyncio.run(_run(config, load))


async def _run(config, load):
  target = http_client.Target.of(config.url)
  listed = (await http_client.get_json(target, "/v1/models"))["data"]
  model = config.model or listed[0]["id"]
  words = _Prompts(config.seed)
  tasks, begin = [], time.perf_counter()
  with progress(len(load), "requests", "Sending") as bar:
    for number in range(len(load)):
      due = begin + float(load.arrival_s[number])
      await asyncio.sleep(max(due - time.perf_counter(), 0))
      sent = Sent(due_s=due - begin)
      prompt, outputs = int(load.num_prompt[number]), int(load.num_output[number])
      body = _body(config, model, words.make(prompt), outputs)
      task = asyncio.create_task(_one(config, target, body, sent, begin))
      task.add_done_callback(lambda _: bar.advance(1))
      tasks.append(task)
    return await asyncio.gather(*tasks)


class _Prompts:
  """Token ids that no prefix cache has seen."""

  def __init__(self, seed):
    self._rng = np.random.default_rng(seed)

  def make(self, length):
    return self._rng.integers(3, 250, length).tolist()


def _body(config, model, ids, outputs):
  body = {
    "model": model, "max_tokens": outputs, "stream": True, "temperature": 0,
    "ignore_eos": config.ignore_eos, "stream_options": {"include_usage": True},
  }  # fmt: skip
  if config.endpoint == "chat":
    text = " ".join(map(str, ids))[: 2 * len(ids)]  # of about that many tokens
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
  return "/v1/completions", body | {"prompt": ids}


async def _one(config, target, request, sent, begin):
  path, body = request
  headers = {} if config.key is None else {"authorization": f"Bearer {config.key}"}
  try:
    async with asyncio.timeout(config.timeout_s):
      async with http_client.connected(target) as connection:
        sent.sent_s = time.perf_counter() - begin
        sent.status = await connection.ask("POST", path, json.dumps(body).encode(), headers)
        if sent.status != 200:
          sent.error = (await connection.body())[:200].decode(errors="replace")
          return sent
        async for events in connection.events():
          _take(sent, events, time.perf_counter() - begin)
  except (OSError, EOFError, TimeoutError) as error:
    sent.error = f"{type(error).__name__}: {error}"
    sent.finish_reason = None
  return sent


def _take(sent, events, now_s):
  for data in events:
    if data == b"[DONE]":
      continue
    chunk = json.loads(data)
    if "error" in chunk:
      sent.error, sent.finish_reason = chunk["error"]["message"], None
    if chunk.get("usage"):
      sent.num_prompt = chunk["usage"]["prompt_tokens"]
      # A chunk may hold several tokens: the server joins what a slow reader has not taken.
      missing = chunk["usage"]["completion_tokens"] - len(sent.token_times_s)
      sent.token_times_s += sent.token_times_s[-1:] * max(missing, 0)
    for choice in chunk.get("choices") or ():
      if choice.get("text") or (choice.get("delta") or {}).get("content") is not None:
        sent.token_times_s.append(now_s)
      sent.finish_reason = choice.get("finish_reason") or sent.finish_reason


def summary(config, load, all_sent):
  """vLLM's key names, what failed, and this client's own lag."""
  counted = all_sent[config.warm_up :]
  times = [
    metrics.RequestTimes(
      request_id=str(number), arrival_s=sent.sent_s, token_times_s=sent.token_times_s,
      num_prompt=sent.num_prompt, finish_reason=sent.finish_reason,
    )
    for number, sent in enumerate(counted)
  ]  # fmt: skip
  lag = 1e3 * np.array([sent.sent_s - sent.due_s for sent in counted])
  failed = [sent for sent in counted if sent.finish_reason is None]
  goodness = {}
  if config.slo is not None:
    good = [one for one in times if one.completed and metrics.meets(one, config.slo)]
    goodness = {"slo": dataclasses.asdict(config.slo), "good_share": len(good) / len(times)}
  return {
    **metrics.summarize(times, slo=config.slo),
    **goodness,
    "num_prompts": len(counted), "warm_up": config.warm_up, "failed": len(failed),
    "errors": sorted({f"{s.status}: {s.error}"[:120] for s in failed})[:5],
    "request_rate": load.rate,
    "client_lag_p50_ms": float(np.median(lag)), "client_lag_max_ms": float(lag.max()),
    "client_late": int((lag > 1e3 * _LATE_S).sum()),
  }  # fmt: skip


def arrivals(rng, count, rate, burstiness):
  """Times of requests; burstiness as in vLLM: 1 is Poisson, less comes in bursts."""
  if rate == float("inf"):
    return np.zeros(count)
  return workload.gamma_arrivals(rng, count, rate=rate, cv=burstiness**-0.5)
