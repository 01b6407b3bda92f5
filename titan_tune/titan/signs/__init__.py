"""What the lines of a torchtitan log are signs of: failures, traps, measured facts. Pure."""
