"""One worker a peer; all but jaxserve's run in environments of their own and import none of us."""
