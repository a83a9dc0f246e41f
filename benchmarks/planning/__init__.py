"""What the planner makes of other tools' ranks."""
