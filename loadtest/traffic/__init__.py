"""From a scenario to a schedule: arrival times, lengths and prompts, all seeded."""
