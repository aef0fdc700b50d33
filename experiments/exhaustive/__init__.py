"""Every reachable state of tiny schedulers."""
