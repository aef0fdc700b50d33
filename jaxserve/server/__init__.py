"""The OpenAI-compatible HTTP server. Needs the extra `serve`.

`serve` runs until a signal. The engine steps on a thread of its own (`engine_thread`), text is made
and counted on the event loop (`service`, `generation`), and the routes (`app`) are between.
"""

from jaxserve.server.loading import answering
from jaxserve.server.service import Served
from jaxserve.server.serving import ServerOptions, listen, serve

__all__ = ["Served", "ServerOptions", "answering", "listen", "serve"]
