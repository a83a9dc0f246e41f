"""What "When Smaller Is Slower" (Xin et al., 2026) timed, repeated on this GPU by one command."""
