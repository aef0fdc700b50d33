"""One worker a peer; all but jaxserve's run in an environment of their own and import none of us."""
