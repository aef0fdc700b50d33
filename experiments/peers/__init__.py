"""jaxserve beside the engines that people would pick instead, on this machine's CPU."""
