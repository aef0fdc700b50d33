"""What is found again: a trace by the scheduler alone, and two turns of a chat."""
