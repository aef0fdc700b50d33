"""Runs files of expected scheduler decisions against the pure functions of `jaxserve.sched`."""
