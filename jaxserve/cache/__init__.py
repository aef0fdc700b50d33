"""The KV page pool: which pages are free, and who gets them. No tensors of keys or values here."""

from jaxserve.cache.pages import allocate, create, release

__all__ = ["allocate", "create", "release"]
