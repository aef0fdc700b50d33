"""Prefill and decode on servers of their own, as a what-if: two fleets and a link between them.

A prefill server computes the prompt and the first output. The prompt's KV then goes over the
server's link, one request after another, and the request arrives at a decode server, where the same
scheduler admits it with nothing left to compute but its next token.

Left out: a prefill server frees its pages when the first output is there, not when the transfer
has ended; a full decode fleet does not slow the prefill fleet down; layers are not sent while
others are still computed.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxserve.sim.fleet import Fleet, FleetResult, serve
from jaxserve.sim.result import SimResult
from jaxserve.workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
  """The way out of each prefill server, used by one transfer at a time.

  Attributes:
    bytes_per_token: KV of one token; `cost.kv_bytes_per_token`.
    bytes_per_s: bandwidth.
    latency_s: of every transfer besides.

  Raises:
    ValueError: naming the field.
  """

  bytes_per_token: float
  bytes_per_s: float
  latency_s: float = 0.0

  def __post_init__(self) -> None:
    for field in ("bytes_per_token", "bytes_per_s"):
      if not 0 < getattr(self, field) < float("inf"):
        raise ValueError(f"{field}={getattr(self, field)}: must be a positive number")
    if not 0 <= self.latency_s < float("inf"):
      raise ValueError(f"latency_s={self.latency_s}: must not be negative")

  def seconds(self, tokens: np.ndarray) -> np.ndarray:
    """f64[n]: how long the KV of so many tokens is on the way."""
    return self.latency_s + np.asarray(tokens, np.float64) * self.bytes_per_token / self.bytes_per_s


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Disaggregated:
  """What both fleets did.

  Attributes:
    result: of all requests, in order of arrival: first outputs come from the prefill fleet, all
      others from the decode fleet. Counts are sums, busy_s is the mean over all servers.
    prefill: the prefill fleet's part, every request with one output.
    decode: the decode fleet's part, of requests with two outputs or more, in order of arrival
      there; the times of first outputs are 0. None if there is none.
    sent_s: f64[n], from the first output until the KV is at the decode server, waiting for the link
      included; 0 for requests of one output, whose KV stays.
  """

  result: SimResult
  prefill: FleetResult
  decode: FleetResult | None
  sent_s: np.ndarray


def disaggregate(workload: Workload, prefill: Fleet, decode: Fleet, link: Link) -> Disaggregated:
  """Serves a workload with a prefill fleet and a decode fleet in virtual time, to its end.

  Args:
    workload: n requests.
    prefill: computes prompts and first outputs.
    decode: computes all other outputs.
    link: between them.

  Raises:
    ValueError: a request could never be served by one of the fleets, by number.
    RuntimeError: a policy left requests waiting for ever.

  Cost: two calls of `serve`.
  """
  outputs = np.minimum(workload.num_output, decode.config.max_model_len - workload.num_prompt)
  outputs = np.maximum(outputs, 1).astype(np.int32)
  ones = np.ones(len(workload), np.int32)
  before = serve(dataclasses.replace(workload, num_output=ones), prefill)
  first_s = before.result.token_s
  goes = outputs > 1
  arrives_s = first_s + _sent(workload, first_s, before.replica, goes, link)
  after, order = None, np.flatnonzero(goes)
  if len(order):
    order = order[np.argsort(arrives_s[order], kind="stable")]
    handed = Workload(
      arrival_s=arrives_s[order], num_prompt=workload.num_prompt[order],
      num_output=outputs[order], priority=workload.priority[order],
    )  # fmt: skip
    after = serve(handed, decode, handed_over=True)
  return Disaggregated(
    result=_joined(workload, outputs, before, after, order, decode.replicas),
    prefill=before,
    decode=after,
    sent_s=arrives_s - first_s,
  )


def _sent(
  workload: Workload, first_s: np.ndarray, replica: np.ndarray, goes: np.ndarray, link: Link
) -> np.ndarray:
  """f64[n]: seconds until each KV has arrived; every prefill server sends one after another."""
  sent, takes = np.zeros(len(workload)), link.seconds(workload.num_prompt)
  free_at = np.zeros(int(replica.max()) + 1)
  for i in np.argsort(first_s, kind="stable"):
    if goes[i]:
      free_at[replica[i]] = max(free_at[replica[i]], first_s[i]) + takes[i]
      sent[i] = free_at[replica[i]] - first_s[i]
  return sent


def _joined(
  workload: Workload, outputs: np.ndarray, before: FleetResult, after: FleetResult | None,
  order: Sequence[int] | np.ndarray, decoders: int,
) -> SimResult:  # fmt: skip
  first = np.cumsum(outputs, dtype=np.int64) - outputs
  token_s = np.zeros(int(outputs.sum()))
  parts = [before.result]
  if after is not None:
    own = outputs[order]
    shift = np.repeat(first[order] - (np.cumsum(own, dtype=np.int64) - own), own)
    token_s[shift + np.arange(len(shift))] = after.result.token_s
    parts.append(after.result)
  token_s[first] = before.result.token_s  # over the places that the decode fleet left 0
  busy = float(before.result.busy_s) * len(before.servers)
  busy += float(after.result.busy_s) * decoders if after else 0.0
  return SimResult(
    arrival_s=before.result.arrival_s,
    num_prompt=workload.num_prompt,
    num_output=outputs,
    started_s=before.result.started_s,
    token_s=token_s,
    **{
      name: np.asarray(sum(int(getattr(part, name)) for part in parts))
      for name in ("steps", "tokens", "padding", "preemptions")
    },
    busy_s=np.asarray(busy / (len(before.servers) + decoders)),
  )
