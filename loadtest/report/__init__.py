"""From the records of runs to percentiles with confidence intervals, speedups and an HTML page."""
