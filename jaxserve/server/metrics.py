"""Prometheus series: vLLM's suffixes under `jaxserve:`, and the token budget, step by step."""

import prometheus_client as prometheus

from jaxserve.engine import Engine
from jaxserve.metrics import Acceptance
from jaxserve.server.engine_thread import Report
from jaxserve.server.generation import Choice

CONTENT_TYPE = prometheus.CONTENT_TYPE_LATEST
_PREFIX = "jaxserve:"
# Series that vLLM does not have; all others are known under its prefix too, if that is asked for.
_OWN = (
  "requests_rejected", "numeric_errors", "http_responses", "step_", "retraces", "plan_seconds",
  "device_seconds", "decode_stall_seconds", "compile_", "prefix_cache_evictions",
)  # fmt: skip
_DECODE_WEIGHT = 0.1  # of a step in the running mean of decode-only steps
_VLLM_PREFIX = "vllm:"
_SECONDS = (
  0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 240.0,
)  # fmt: skip
_TOKENS = tuple(float(1 << power) for power in range(0, 18))


class Metrics:
  """All series of one server, in a registry of their own. Updated once a step, on one thread."""

  def __init__(self, model: str, engine: Engine):
    self.registry = prometheus.CollectorRegistry()
    self._engine, self._model = engine, model
    scheduler = engine.config.scheduler
    self._num_pages = scheduler.cache.num_pages
    self._running = self._gauge("num_requests_running", "Requests that have been scheduled.")
    self._waiting = self._gauge("num_requests_waiting", "Requests that have not.")
    self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.")
    self._prompt = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
    self._queried = self._counter("prefix_cache_queries", "Tokens looked up at first admission.")
    self._hit = self._counter("prefix_cache_hits", "Those of them that were found.")
    self._evicted = self._counter("prefix_cache_evictions", "Pages whose content was lost.")
    self._generated = self._counter("generation_tokens", "Generated tokens.")
    self._preemptions = self._counter("num_preemptions", "Requests that lost their pages.")
    self._success = self._counter("request_success", "Ended requests.", "finished_reason")
    self.rejected = self._counter("requests_rejected", "Refused with 429: the queue was full.")
    self.numeric_errors = self._counter("numeric_errors", "Requests ended by a NaN.")
    self._responses = self._counter("http_responses", "Responses by status code.", "code")
    self._ttft = self._seconds("time_to_first_token_seconds", "Arrival to first token.")
    self._itl = self._seconds("inter_token_latency_seconds", "Between two tokens of a stream.")
    self._tpot = self._seconds(
      "request_time_per_output_token_seconds", "Mean of a request's gaps between tokens."
    )
    self._e2e = self._seconds("e2e_request_latency_seconds", "Arrival to last token.")
    self._queue = self._seconds("request_queue_time_seconds", "Arrival to the first schedule.")
    self._prefill = self._seconds("request_prefill_time_seconds", "First schedule to first token.")
    self._inference = self._seconds(
      "request_inference_time_seconds", "First schedule to last token."
    )
    self._decode = self._seconds("request_decode_time_seconds", "First to last token.")
    self._prompt_sizes = self._tokens("request_prompt_tokens", "Prompt tokens of a request.")
    self._output_sizes = self._tokens("request_generation_tokens", "Outputs of a request.")
    self._max_tokens = self._tokens("request_params_max_tokens", "Most outputs asked for.")
    self._iteration = self._tokens("iteration_tokens_total", "Tokens computed by a step.")
    self._budget = self._gauge("step_budget_tokens", "Token budget of the last step.")
    self._scheduled = self._counter(
      "step_scheduled_tokens", "Tokens computed by steps, padding among them.", "kind"
    )
    self._step = self._seconds("step_seconds", "Dispatch of a step to its outputs.", "bucket")
    self._speculation()
    self._plan = self._seconds("plan_seconds", "Host: scheduling a step and laying it out.")
    self._device = self._seconds("device_seconds", "A step, without waiting for the one before.")
    self._stall = self._seconds(
      "decode_stall_seconds",
      "By how much prefill made a step with decodes longer than theirs alone.",
    )
    self._done_s = 0.0
    self._decode_only_s: float | None = None  # running mean
    self._compiled(engine)
    self._retraces = self._gauge("retraces", "Traces and compiles since start-up.")
    self._info(scheduler.cache.page_size)

  def on_report(self, report: Report) -> None:
    """Counts a step."""
    self._running.set(report.running)
    self._waiting.set(report.waiting)
    self._kv_usage.set(1 - report.free_pages / self._num_pages)
    self._retraces.set(self._engine.retraces)
    events = report.events
    if events is None:
      return
    prefill = sum(part.tokens for part in events.scheduled if part.is_prefill)
    total = events.num_tokens
    self._budget.set(events.budget)
    for kind, tokens in (
      ("prefill", prefill), ("decode", total - prefill), ("padding", events.bucket - total),
    ):  # fmt: skip
      self._scheduled.labels(self._model, "0", kind).inc(tokens)
    self._iteration.observe(total)
    self._preemptions.inc(len(events.preempted))
    first = [part for part in events.scheduled if part.admission == "first"]
    if self._engine.config.scheduler.prefix_cache:
      self._queried.inc(sum(part.known for part in first))
    self._hit.inc(sum(part.cached for part in first))
    self._evicted.inc(events.evicted)
    self._generated.inc(len(report.tokens))
    if any(part.drafts for part in events.scheduled):
      self._count_drafts(events.acceptance)
    step = self._step.labels(self._model, "0", str(events.bucket))
    step.observe(events.done_s - events.dispatched_s)
    self._plan.observe(events.plan_s)
    device_s = events.done_s - max(events.dispatched_s, self._done_s)
    self._done_s = events.done_s
    self._device.observe(device_s)
    self._stalls(device_s, prefill, total - prefill)

  def _stalls(self, device_s: float, prefill: int, decode: int) -> None:
    if decode and not prefill:
      mean = device_s if self._decode_only_s is None else self._decode_only_s
      self._decode_only_s = mean + _DECODE_WEIGHT * (device_s - mean)
    elif decode:
      self._stall.observe(max(device_s - (self._decode_only_s or 0.0), 0.0))

  def _speculation(self) -> None:
    self._drafts = [
      self._counter(f"spec_decode_num_{name}", text)
      for name, text in (
        ("drafts", "Times that drafts of a request were verified."),
        ("draft_tokens", "Draft tokens verified."),
        ("accepted_tokens", "Draft tokens that the model found right."),
      )
    ]
    self._by_position = self._counter(
      "spec_decode_num_accepted_tokens_per_pos", "The same by place in the draft.", "position"
    )

  def _compiled(self, engine: Engine) -> None:
    reports = engine.compile_reports
    seconds = self._counter("compile_seconds", "Tracing and compiling at start-up.")
    seconds.inc(sum(report.trace_s + report.compile_s for report in reports))
    self._counter("compile_executables", "Made at start-up.").inc(len(reports))
    hits = self._counter("compile_cache_hits", "Of them, read from the store.")
    hits.inc(sum(report.cache_hit for report in reports))

  def _count_drafts(self, found: Acceptance) -> None:
    numbers = found.drafts, found.draft_tokens, found.accepted_tokens
    for counter, number in zip(self._drafts, numbers, strict=True):
      counter.inc(number)
    for place, number in enumerate(found.accepted_by_position):
      self._by_position.labels(self._model, "0", str(place)).inc(number)

  def token(self, arrival_s: float, choice: Choice, now_s: float) -> None:
    """Counts a token of a request that is not in `choice.token_times_s` yet."""
    if choice.token_times_s:
      self._itl.observe(now_s - choice.token_times_s[-1])
      return
    self._ttft.observe(now_s - arrival_s)
    self._prompt.inc(len(choice.job.prompt))
    if choice.admitted_s is not None:
      self._queue.observe(choice.admitted_s - arrival_s)
      self._prefill.observe(now_s - choice.admitted_s)

  def finished(self, arrival_s: float, choice: Choice, reason: str) -> None:
    """Counts a request that has ended."""
    self._success.labels(self._model, "0", reason).inc()
    times = choice.token_times_s
    if reason == "abort" or not times:
      return
    self._prompt_sizes.observe(len(choice.job.prompt))
    self._output_sizes.observe(choice.num_tokens)
    self._e2e.observe(times[-1] - arrival_s)
    self._decode.observe(times[-1] - times[0])
    if choice.admitted_s is not None:
      self._inference.observe(times[-1] - choice.admitted_s)
    if choice.job.sampling.max_tokens is not None:
      self._max_tokens.observe(choice.job.sampling.max_tokens)
    if len(times) > 1:
      self._tpot.observe((times[-1] - times[0]) / (len(times) - 1))

  def response(self, status: int) -> None:
    """Counts an HTTP response."""
    self._responses.labels(self._model, "0", str(status)).inc()

  def text(self, vllm_names: bool = False) -> bytes:
    """The exposition; with `vllm_names`, what vLLM has also under the name that it has there."""
    text = prometheus.generate_latest(self.registry)
    if not vllm_names:
      return text
    own = tuple((_PREFIX + name).encode() for name in _OWN)
    lines = (line for line in text.splitlines(keepends=True) if not any(o in line for o in own))
    return text + b"".join(lines).replace(_PREFIX.encode(), _VLLM_PREFIX.encode())

  def _info(self, page_size: int) -> None:
    names = ("model_name", "engine", "block_size", "num_gpu_blocks")
    info = prometheus.Gauge(
      f"{_PREFIX}cache_config_info", "The KV pool.", names, registry=self.registry
    )
    info.labels(self._model, "0", str(page_size), str(self._num_pages)).set(1)

  def _gauge(self, name: str, text: str) -> prometheus.Gauge:
    gauge = prometheus.Gauge(_PREFIX + name, text, ("model_name", "engine"), registry=self.registry)
    return gauge.labels(self._model, "0")

  def _counter(self, name: str, text: str, *labels: str) -> prometheus.Counter:
    names = ("model_name", "engine", *labels)
    counter = prometheus.Counter(_PREFIX + name, text, names, registry=self.registry)
    return counter if labels else counter.labels(self._model, "0")

  def _seconds(self, name: str, text: str, *labels: str) -> prometheus.Histogram:
    return self._histogram(name, text, _SECONDS, labels)

  def _tokens(self, name: str, text: str) -> prometheus.Histogram:
    return self._histogram(name, text, _TOKENS, ())

  def _histogram(
    self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...]
  ) -> prometheus.Histogram:
    names = ("model_name", "engine", *labels)
    histogram = prometheus.Histogram(
      _PREFIX + name, text, names, registry=self.registry, buckets=buckets
    )
    return histogram if labels else histogram.labels(self._model, "0")
