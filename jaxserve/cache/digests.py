"""Digests of KV pages, on the host: what makes two pages the same.

  root          SHA-256(salt of the run, salt of the request)
  digest of i   SHA-256(digest of page i - 1 or root, token ids of page i)

each cut to 128 bits. So a digest stands for its page's tokens and for all before them, and requests
with different salts share nothing. The salt of a run keeps strangers from finding collisions, or
from learning by the response time what others have asked.
Source: vLLM V1 `hash_block_tokens`; the cut to 128 bits is ours.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

ROOT_BYTES = 16


def root_digest(salt: bytes, request_salt: str | None = None) -> bytes:
  """What the chain of a request's digests begins with, 16 bytes.

  Args:
    salt: of the run; equal in processes that are to agree on digests.
    request_salt: of the request; None and "" are different from each other.
  """
  parts = [b"none" if request_salt is None else b"some", (request_salt or "").encode()]
  return hashlib.sha256(b"".join([len(salt).to_bytes(8, "little"), salt, *parts])).digest()[
    :ROOT_BYTES
  ]


def page_digests(tokens: Sequence[int] | np.ndarray, page_size: int, parent: bytes) -> np.ndarray:
  """Digests of the full pages of `tokens`, u32[len(tokens) // page_size, 4].

  Word 0 is never 0, which means "no content". About 1 us a page, and 0.1 us a token.

  Args:
    tokens: ids of whole pages from a page's start on; an incomplete last page is left out.
    page_size: S, tokens a page.
    parent: `root_digest`, or the bytes of the digest of the page before.
  """
  count = len(tokens) // page_size
  data = np.asarray(tokens[: count * page_size], "<i4").tobytes()
  width, digests = 4 * page_size, np.empty((count, 4), "<u4")
  for page in range(count):
    text = hashlib.sha256(parent + data[page * width : (page + 1) * width]).digest()[:ROOT_BYTES]
    if text[:4] == b"\0\0\0\0":
      text = b"\1" + text[1:]
    digests[page], parent = np.frombuffer(text, "<u4"), text
  return digests


class PageChain:
  """The digests of one request, as its tokens become known.

  Attributes:
    prompt_digests: u32[pages, 4], of the full pages of the prompt.
    num_pages: digests so far.
    num_outputs: tokens after the prompt that are in it.
  """

  def __init__(self, prompt: Sequence[int], page_size: int, root: bytes):
    self.page_size, self.num_outputs = page_size, 0
    self.prompt_digests = page_digests(prompt, page_size, root)
    self.num_pages = len(self.prompt_digests)
    self._parent = self.prompt_digests[-1].tobytes() if self.num_pages else root
    self._rest = list(prompt[self.num_pages * page_size :])

  def append(self, token: int) -> np.ndarray | None:
    """The digest, u32[4], of the page that this token completes, if it does."""
    self._rest.append(token)
    self.num_outputs += 1
    if len(self._rest) < self.page_size:
      return None
    digest = page_digests(self._rest, self.page_size, self._parent)[0]
    self._parent, self._rest = digest.tobytes(), []
    self.num_pages += 1
    return digest

  def catch_up(self, outputs: Sequence[int]) -> np.ndarray | None:
    """Appends the outputs that are not in it yet, up to the next digest, which it returns."""
    while self.num_outputs < len(outputs):
      digest = self.append(outputs[self.num_outputs])
      if digest is not None:
        return digest
    return None
