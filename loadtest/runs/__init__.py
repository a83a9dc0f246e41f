"""One run on disk: its target, records, machine, server metrics, client health and verdict."""
