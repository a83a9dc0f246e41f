"""What several benchmarks share: engines in processes, texts, models, tables, pages and plots."""
