"""A measured run of vLLM against the simulator."""
