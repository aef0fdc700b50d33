"""What 8 and 4 bits cost in accuracy and save in time."""
