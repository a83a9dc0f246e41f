"""The client: sends requests when they are due and records every token as it arrives."""
