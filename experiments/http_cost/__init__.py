"""What HTTP costs a step, and whether chunking still pays behind it."""
